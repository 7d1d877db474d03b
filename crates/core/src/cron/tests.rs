use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

#[rstest]
#[case::every_night("0 2 * * *", "2026-03-10T02:00:00Z", "2026-03-11T02:00:00Z")]
#[case::steps("*/15 * * * *", "2026-03-10T02:01:00Z", "2026-03-10T02:15:00Z")]
#[case::from_on("5/20 1 * * *", "2026-03-10T01:06:00Z", "2026-03-10T01:25:00Z")]
#[case::names("30 22 * * MON-FRI", "2026-03-13T23:00:00Z", "2026-03-16T22:30:00Z")]
#[case::seven_is_sunday("0 0 * * 7", "2026-03-10T00:00:00Z", "2026-03-15T00:00:00Z")]
#[case::either_day("0 0 13 * FRI", "2026-03-01T00:00:00Z", "2026-03-06T00:00:00Z")]
#[case::leap_day("0 0 29 2 *", "2026-03-01T00:00:00Z", "2028-02-29T00:00:00Z")]
#[case::month_name("0 0 1 jun *", "2026-03-01T00:00:00Z", "2026-06-01T00:00:00Z")]
#[case::zone("TZ=Europe/Berlin 0 2 * * *", "2026-07-01T12:00:00Z", "2026-07-02T00:00:00Z")]
#[case::zone_in_winter("TZ=Europe/Berlin 0 2 * * *", "2026-01-01T12:00:00Z", "2026-01-02T01:00:00Z")]
#[case::skipped_hour("TZ=Europe/Berlin 30 2 * * *", "2026-03-29T00:00:00Z", "2026-03-29T01:30:00Z")]
fn the_next_start_is_found(#[case] schedule: &str, #[case] after: &str, #[case] next: &str) {
    assert_eq!(Schedule::parse(schedule).unwrap().next_after(at(after)), Some(at(next)));
}

#[rstest]
#[case("", Invalid::Fields(0))]
#[case("0 2 * *", Invalid::Fields(4))]
#[case("0 0 2 * * *", Invalid::Fields(6))]
#[case("60 2 * * *", Invalid::Range { value: 60, min: 0, max: 59 })]
#[case("0 2 0 * *", Invalid::Range { value: 0, min: 1, max: 31 })]
#[case("x 2 * * *", Invalid::Field("x".into()))]
#[case("5-1 2 * * *", Invalid::Field("5-1".into()))]
#[case("*/0 2 * * *", Invalid::Field("*/0".into()))]
#[case("+5 2 * * *", Invalid::Field("+5".into()))]
#[case("0 0 30 2 *", Invalid::Never)]
#[case("TZ=Mars/Olympus 0 2 * * *", Invalid::Zone("Mars/Olympus".into()))]
#[case("@daily", Invalid::Fields(1))]
fn other_texts_are_refused_with_a_reason(#[case] text: &str, #[case] why: Invalid) {
    assert_eq!(Schedule::parse(text).unwrap_err(), why);
}

#[test]
fn a_window_is_open_from_its_start_until_its_duration_is_over() {
    let window = Window { schedule: Schedule::parse("0 2 * * *").unwrap(), duration: Duration::from_secs(4 * 3600) };
    let closed = |until: &str| Opening::Closed { opens: Some(at(until)) };
    assert_eq!(window.at(at("2026-03-10T01:59:59Z")), closed("2026-03-10T02:00:00Z"));
    assert_eq!(window.at(at("2026-03-10T02:00:00Z")), Opening::Open);
    assert_eq!(window.at(at("2026-03-10T05:59:59Z")), Opening::Open);
    assert_eq!(window.at(at("2026-03-10T06:00:00Z")), closed("2026-03-11T02:00:00Z"));
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "[0-9*/,?A-Z= -]{0,24}") {
        let _ = Schedule::parse(&text);
    }

    #[test]
    fn a_start_is_always_later_than_asked(minute in 0u8..60, hour in 0u8..24, after in 0i64..4_000_000_000) {
        let schedule = Schedule::parse(&format!("TZ=America/New_York {minute} {hour} * * *")).unwrap();
        let after = Timestamp::from_second(after).unwrap();
        let next = schedule.next_after(after).unwrap();
        prop_assert!(next > after && next.duration_since(after).as_hours() <= 49);
    }
}
