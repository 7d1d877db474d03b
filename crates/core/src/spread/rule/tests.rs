use std::collections::BTreeMap;

use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| (format!("spotalis.io/{k}"), (*v).to_owned())).collect()
}

fn of(pairs: &[(&str, &str)]) -> Result<Option<Rule>, Invalid> {
    read(&map(pairs))
}

fn share(pairs: &[(&str, &str)]) -> (u8, u32) {
    let share = of(pairs).unwrap().unwrap().share;
    (share.percentage, share.floor)
}

#[rstest]
#[case::plain("70", 70)]
#[case::percent_sign("70%", 70)]
#[case::zero("0", 0)]
#[case::hundred("100%", 100)]
#[case::leading_zeros("007", 7)]
fn a_percentage_is_read(#[case] text: &str, #[case] percentage: u8) {
    assert_eq!(share(&[("spot-percentage", text)]), (percentage, 0));
}

#[rstest]
fn a_wrong_percentage_is_refused_by_name(
    #[values(
        "150",
        "101",
        "-10",
        "70.5",
        "NaN",
        "1e9",
        "%",
        "70%%",
        "+70",
        " 70",
        "\u{667}\u{660}",
        "99999999999999999999"
    )]
    text: &str,
) {
    let error = of(&[("spot-percentage", text)]).unwrap_err();
    assert_eq!(error, Invalid::Percentage(text.to_owned()));
    assert!(error.to_string().starts_with(&format!("invalid spotalis.io/spot-percentage value {text:?}")), "{error}");
}

#[rstest]
fn a_wrong_floor_is_refused_by_name(#[values("-1", "10001", "2.5", "two", "1e3", "18446744073709551616")] text: &str) {
    assert_eq!(of(&[("spot-percentage", "70"), ("min-on-demand", text)]), Err(Invalid::Floor(text.to_owned())));
}

#[test]
fn an_empty_value_is_no_value() {
    assert_eq!(of(&[("spot-percentage", "")]), Ok(None));
    assert_eq!(share(&[("spot-percentage", ""), ("min-on-demand", "2")]), (0, 2));
    assert_eq!(share(&[("spot-percentage", "50"), ("min-on-demand", ""), ("disruption-schedule", "")]), (50, 0));
}

#[test]
fn without_a_tuning_key_nothing_is_managed() {
    assert_eq!(of(&[]), Ok(None));
    assert_eq!(of(&[("disruption-schedule", "0 2 * * *"), ("disruption-duration", "1h")]), Ok(None));
}

#[rstest]
#[case::annotation(&[("enabled", "true")], &[], true)]
#[case::label(&[], &[("enabled", "true")], true)]
#[case::capital(&[("enabled", "True")], &[], false)]
#[case::capital_label(&[], &[("enabled", "True")], false)]
#[case::one(&[("enabled", "1")], &[], false)]
#[case::annotation_over_label(&[("enabled", "false")], &[("enabled", "true")], false)]
#[case::annotation_over_label_on(&[("enabled", "true")], &[("enabled", "false")], true)]
#[case::empty_annotation(&[("enabled", "")], &[("enabled", "true")], true)]
#[case::neither(&[], &[], false)]
fn opting_in_is_exact(#[case] annotations: &[(&str, &str)], #[case] labels: &[(&str, &str)], #[case] on: bool) {
    assert_eq!(enabled(&map(annotations), &map(labels)), on);
}

const P: (&str, &str) = ("spot-percentage", "50");

#[test]
fn half_a_window_is_refused_whichever_half() {
    let error = of(&[P, ("disruption-schedule", "0 2 * * *")]).unwrap_err();
    assert!(error.to_string().contains("without spotalis.io/disruption-duration"), "{error}");
    let error = of(&[P, ("disruption-duration", "1h")]).unwrap_err();
    assert!(error.to_string().contains("without spotalis.io/disruption-schedule"), "{error}");
}

#[rstest]
#[case::six_fields("0 0 2 * * *", "1h", "expected 5 fields")]
#[case::zero_duration("0 2 * * *", "0s", "longer than 0")]
#[case::negative_duration("0 2 * * *", "-1h", "negative")]
#[case::no_unit("0 2 * * *", "4", "unit")]
fn a_wrong_window_is_refused(#[case] schedule: &str, #[case] lasting: &str, #[case] why: &str) {
    let error = of(&[P, ("disruption-schedule", schedule), ("disruption-duration", lasting)]).unwrap_err();
    assert!(error.to_string().contains(why), "{error}");
}

#[test]
fn a_workloads_own_window_is_stronger_than_its_namespaces() {
    let pair = |schedule, lasting| [("disruption-schedule", schedule), ("disruption-duration", lasting)];
    let around = window(&map(&pair("0 2 * * *", "1h")));
    let [schedule, lasting] = pair("TZ=Asia/Tokyo 0 5 * * SUN", "2h");
    let (plain, own) = (of(&[P]).unwrap().unwrap(), of(&[P, schedule, lasting]).unwrap().unwrap());
    let inherited = plain.clone().within(&around).unwrap().window.unwrap();
    assert_eq!(inherited.schedule.text(), "0 2 * * *");
    let kept = own.clone().within(&around).unwrap().window.unwrap();
    assert_eq!((kept.schedule.text(), kept.duration.as_secs()), ("TZ=Asia/Tokyo 0 5 * * SUN", 7200));
    // One that cannot be read concerns only those who depend on it.
    let half = window(&map(&[("disruption-duration", "1h")]));
    assert!(plain.within(&half).is_err() && own.within(&half).is_ok());
}

proptest! {
    #[test]
    fn no_value_makes_it_panic(p in ".{0,12}", m in ".{0,12}", s in ".{0,20}", d in ".{0,8}") {
        let pairs = [
            ("spot-percentage", p.as_str()), ("min-on-demand", m.as_str()),
            ("disruption-schedule", s.as_str()), ("disruption-duration", d.as_str()),
        ];
        let _ = of(&pairs);
    }
}
