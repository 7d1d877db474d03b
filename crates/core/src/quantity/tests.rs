use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn canonical(text: &str) -> String {
    parse(text).unwrap().to_string()
}

#[rstest]
#[case("0", "0")]
#[case("-0", "0")]
#[case("400m", "400m")]
#[case("0.4", "400m")]
#[case(".5", "500m")]
#[case("5.", "5")]
#[case("+5", "5")]
#[case("-5", "-5")]
#[case("007", "7")]
#[case("1000m", "1")]
#[case("1000", "1k")]
#[case("1500", "1500")]
#[case("1.5k", "1500")]
#[case("12000000", "12M")]
#[case("1E", "1E")]
#[case("0.1m", "100u")]
#[case("100n", "100n")]
#[case("3u", "3u")]
#[case("1T", "1T")]
#[case("1P", "1P")]
fn decimal_units_print_with_the_largest_unit_that_fits(#[case] text: &str, #[case] printed: &str) {
    assert_eq!(canonical(text), printed);
}

#[rstest]
#[case("5Gi", "5Gi")]
#[case("5120Mi", "5Gi")]
#[case("1.5Gi", "1536Mi")]
#[case("0.5Ki", "512")]
#[case("1Ki", "1Ki")]
#[case("-2048Ki", "-2Mi")]
#[case("1023Ki", "1023Ki")]
#[case("1Ei", "1Ei")]
#[case("1.1Ki", "1126400m")]
#[case("0.001Ki", "1024m")]
fn binary_units_print_without_losing_anything(#[case] text: &str, #[case] printed: &str) {
    assert_eq!(canonical(text), printed);
}

#[rstest]
#[case("1e3", "1e3")]
#[case("1E3", "1e3")]
#[case("1E+3", "1e3")]
#[case("1e4", "10e3")]
#[case("5e-1", "500e-3")]
#[case("12.5e3", "12500")]
#[case("1e0", "1")]
#[case("1e400", "10e399")]
#[case("1e4294967299", "1e3")]
fn exponents_stay_exponents(#[case] text: &str, #[case] printed: &str) {
    assert_eq!(canonical(text), printed);
}

#[rstest]
#[case("0.1n", "1n")]
#[case("1.0000000001", "1000000001n")]
#[case("-0.0000000001", "-1n")]
#[case("1e-400", "1e-9")]
#[case("0.00000000049Ki", "502n")]
fn what_is_finer_than_a_nano_rounds_away_from_zero(#[case] text: &str, #[case] printed: &str) {
    assert_eq!(canonical(text), printed);
}

#[rstest]
#[case("9223372036854775807Ki")]
#[case("99999999999999999999999999999999999999999999999999Ki")]
#[case("8Ei")]
#[case("7.9999999999999999999999999999Ei")]
fn binary_sizes_stop_at_the_largest_64_bit_number(#[case] text: &str) {
    assert_eq!(canonical(text), "9223372036854775807");
}

/// Odd, but the API server takes them.
#[rstest]
#[case("+")]
#[case("-")]
#[case(".")]
#[case("k")]
#[case("Ki")]
#[case("e-9")]
fn a_unit_or_sign_alone_is_zero(#[case] text: &str) {
    assert_eq!(canonical(text), "0");
}

#[rstest]
#[case("", Invalid::Syntax)]
#[case("abc", Invalid::Unit)]
#[case("--1", Invalid::Unit)]
#[case("+-1", Invalid::Unit)]
#[case("1.2.3", Invalid::Unit)]
#[case("1e", Invalid::Unit)]
#[case("1e+", Invalid::Unit)]
#[case("1 ", Invalid::Unit)]
#[case(" 1", Invalid::Unit)]
#[case("1K", Invalid::Unit)]
#[case("1ki", Invalid::Unit)]
#[case("1mi", Invalid::Unit)]
#[case("1Zi", Invalid::Unit)]
#[case("1kk", Invalid::Unit)]
#[case("1e3k", Invalid::Unit)]
#[case("1e9223372036854775808", Invalid::Unit)]
#[case("0x10", Invalid::Unit)]
#[case("NaN", Invalid::Unit)]
#[case("\u{0661}", Invalid::Unit)]
#[case("e-10", Invalid::Syntax)]
#[case("Pi", Invalid::Syntax)]
#[case("123456789012345678901234567890123456789", Invalid::Digits)]
fn other_texts_are_refused(#[case] text: &str, #[case] why: Invalid) {
    assert_eq!(parse(text).map(|q| q.to_string()), Err(why));
}

#[rstest]
#[case("1", Some(1000), Some(1))]
#[case("100m", Some(100), Some(1))]
#[case("0.1m", Some(1), Some(1))]
#[case("-0.1m", Some(-1), Some(-1))]
#[case("1.0001", Some(1001), Some(2))]
#[case("128Mi", Some(134_217_728_000), Some(134_217_728))]
#[case("9223372036854775807", None, Some(i64::MAX))]
#[case("1000000000000000000000000000000", None, None)]
#[case("1e400", None, None)]
#[case("1e-400", Some(1), Some(1))]
#[case("0e400", Some(0), Some(0))]
fn numbers_are_counted_rounding_up(#[case] text: &str, #[case] millis: Option<i64>, #[case] units: Option<i64>) {
    let quantity = parse(text).unwrap();
    assert_eq!((quantity.millis(), quantity.units()), (millis, units));
}

#[test]
fn sizes_made_from_numbers_read_well() {
    let printed = [0, 128 << 20, 5 << 30, 2_576_980_377, 1_149_606_912, 1_149_606_000]
        .map(|b| Quantity::from_bytes(b).to_string());
    assert_eq!(printed, ["0", "128Mi", "5Gi", "2576980377", "1149606912", "1149606k"]);
    assert_eq!([400, 1000, 2500, 1].map(|m| Quantity::from_millis(m).to_string()), ["400m", "1", "2500m", "1m"]);
}

#[rstest]
#[case("1", "1000m")]
#[case("1Gi", "1073741824")]
#[case("1e3", "1k")]
#[case("0", "0Ki")]
fn spellings_of_one_value_are_equal(#[case] one: &str, #[case] other: &str) {
    assert_eq!(parse(one), parse(other));
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in ".{0,40}") {
        if let Ok(quantity) = parse(&text) {
            let _ = (quantity.to_string(), quantity.millis(), quantity.units());
        }
    }

    #[test]
    fn what_is_printed_reads_back_as_itself(text in "[+-]?[0-9]{0,20}(\\.[0-9]{0,12})?(n|u|m||k|M|G|T|P|Ki|Mi|Gi|Ti|Pi|Ei|e-?[0-9]{1,2})") {
        if let Ok(quantity) = parse(&text) {
            let printed = quantity.to_string();
            prop_assert_eq!(parse(&printed).map(|q| q.to_string()), Ok(printed.clone()));
            prop_assert_eq!(parse(&printed).ok(), Some(quantity), "{} as {}", text, printed);
        }
    }

    #[test]
    fn counted_numbers_read_back(number in 0..=u64::from(u32::MAX) * 1000) {
        let as_i64 = i64::try_from(number).unwrap();
        prop_assert_eq!(parse(&Quantity::from_millis(number).to_string()).unwrap().millis(), Some(as_i64));
        prop_assert_eq!(parse(&Quantity::from_bytes(number).to_string()).unwrap().units(), Some(as_i64));
    }
}
