//! Durations in Go's spelling: `300ms`, `1m30s`, `1.5h`.

use std::time::Duration;

/// Why a text is no duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("not a duration; write it like 300ms, 30s or 1m30s")]
    Syntax,
    #[error("a number needs a unit: ns, us, ms, s, m or h")]
    Unit,
    #[error("must not be negative")]
    Negative,
    #[error("too long")]
    Range,
}

/// Reads what Go's `time.ParseDuration` reads, except that negative durations are refused.
pub fn parse(text: &str) -> Result<Duration, Invalid> {
    let (negative, mut rest) = match text.as_bytes().first() {
        Some(b'-') => (true, text.get(1..).unwrap_or_default()),
        Some(b'+') => (false, text.get(1..).unwrap_or_default()),
        _ => (false, text),
    };
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(Invalid::Syntax);
    }
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let (value, tail) = component(rest)?;
        nanos = nanos.checked_add(value).ok_or(Invalid::Range)?;
        rest = tail;
    }
    // Go counts in a signed 64-bit number of nanoseconds, about 292 years.
    let nanos = u64::try_from(nanos).ok().filter(|n| *n <= i64::MAX as u64).ok_or(Invalid::Range)?;
    if negative && nanos > 0 {
        return Err(Invalid::Negative);
    }
    Ok(Duration::from_nanos(nanos))
}

/// One number with its unit, in nanoseconds, and what follows it.
fn component(text: &str) -> Result<(u128, &str), Invalid> {
    let digits_end = |s: &str| s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
    let (whole, rest) = text.split_at(digits_end(text));
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(digits_end(rest)),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(Invalid::Syntax);
    }
    let unit_end = rest.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(unit_end);
    let unit = unit_nanos(unit)?;
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| Invalid::Range)? };
    let mut nanos = whole.checked_mul(unit).ok_or(Invalid::Range)?;
    let mut scale = unit;
    for digit in fraction.bytes() {
        // Below a nanosecond nothing is counted, as in Go.
        scale /= 10;
        nanos += u128::from(digit - b'0') * scale;
    }
    Ok((nanos, rest))
}

fn unit_nanos(unit: &str) -> Result<u128, Invalid> {
    Ok(match unit {
        "ns" => 1,
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        "" => return Err(Invalid::Unit),
        _ => return Err(Invalid::Syntax),
    })
}

/// Writes what Go's `Duration.String` writes.
#[must_use]
pub fn text(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    let below_a_second = |unit: u128, name: &str| format!("{}{name}", decimal(nanos, unit));
    match nanos {
        0 => "0s".to_owned(),
        1..1_000 => below_a_second(1, "ns"),
        1_000..1_000_000 => below_a_second(1_000, "\u{b5}s"),
        1_000_000..1_000_000_000 => below_a_second(1_000_000, "ms"),
        _ => {
            let (minutes, rest) = (nanos / 60_000_000_000, nanos % 60_000_000_000);
            let seconds = decimal(rest, 1_000_000_000);
            match (minutes / 60, minutes % 60) {
                (0, 0) => format!("{seconds}s"),
                (0, m) => format!("{m}m{seconds}s"),
                (h, m) => format!("{h}h{m}m{seconds}s"),
            }
        }
    }
}

fn decimal(nanos: u128, unit: u128) -> String {
    let (whole, rest) = (nanos / unit, nanos % unit);
    if rest == 0 {
        return whole.to_string();
    }
    let width = unit.ilog10() as usize;
    let fraction = format!("{rest:0width$}");
    format!("{whole}.{}", fraction.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("0", 0)]
    #[case("300ms", 300_000_000)]
    #[case("1m30s", 90_000_000_000)]
    #[case("1.5h", 5_400_000_000_000)]
    #[case(".5s", 500_000_000)]
    #[case("1.s", 1_000_000_000)]
    #[case("+2us", 2_000)]
    #[case("2\u{b5}s", 2_000)]
    #[case("0.0000000001s", 0)]
    #[case("-0s", 0)]
    fn spellings_of_go_are_read(#[case] text: &str, #[case] nanos: u64) {
        assert_eq!(parse(text), Ok(Duration::from_nanos(nanos)));
    }

    #[rstest]
    #[case("", Invalid::Syntax)]
    #[case("30", Invalid::Unit)]
    #[case("s", Invalid::Syntax)]
    #[case(".s", Invalid::Syntax)]
    #[case("1d", Invalid::Syntax)]
    #[case("1 s", Invalid::Syntax)]
    #[case("1m30", Invalid::Unit)]
    #[case("-1s", Invalid::Negative)]
    #[case("9999999999h", Invalid::Range)]
    #[case("99999999999999999999999999999999999999999s", Invalid::Range)]
    fn other_texts_are_refused_with_a_reason(#[case] text: &str, #[case] why: Invalid) {
        assert_eq!(parse(text), Err(why));
    }

    #[rstest]
    #[case(0, "0s")]
    #[case(1, "1ns")]
    #[case(1_100, "1.1\u{b5}s")]
    #[case(2_200_000, "2.2ms")]
    #[case(3_300_000_000, "3.3s")]
    #[case(245_000_000_000, "4m5s")]
    #[case(18_367_000_000_000, "5h6m7s")]
    #[case(480_000_000_001, "8m0.000000001s")]
    fn durations_print_as_go_prints_them(#[case] nanos: u64, #[case] expected: &str) {
        assert_eq!(text(Duration::from_nanos(nanos)), expected);
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(nanos in 0..=i64::MAX as u64) {
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(parse(&text(duration)), Ok(duration));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,40}") {
            let _ = parse(&text);
        }
    }
}
