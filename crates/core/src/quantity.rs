//! Resource quantities: `400m`, `5Gi`, `1e3`, read and printed as the API server does it.
//!
//! Guarantees: exact integers throughout; what lies below a nano is rounded away from zero; binary spellings stop at
//! 2⁶³−1; the printed form is the canonical one.
//! Caveats: more than 38 significant digits are refused, and above `999E` the printer writes an exponent where the API
//! server drops the suffix and with it the size.

use std::fmt;

/// Why a text is no quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("not a quantity; write it like 100m, 1.5 or 128Mi")]
    Syntax,
    #[error("unknown unit; known are n u m k M G T P E, Ki Mi Gi Ti Pi Ei and e3")]
    Unit,
    #[error("more digits than can be counted")]
    Digits,
}

/// A number of something: `mantissa · 10^scale`, without trailing zeros in the mantissa.
#[derive(Clone, Copy, Debug)]
pub struct Quantity {
    mantissa: i128,
    scale: i64,
    form: Form,
}

/// How the value was spelled, which is how it is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Decimal,
    Binary,
    Exponent,
}

/// The finest step that is kept.
const NANO: i64 = -9;
const NANOS: u128 = 1_000_000_000;
/// Where binary spellings stop, as in the API server.
const BINARY_CAP: u128 = i64::MAX as u128;
/// As many decimal digits as every `i128` of that length can hold.
const MAX_DIGITS: usize = 38;

const DECIMAL: [(&str, i64); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
const BINARY: [(&str, i64); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];

/// Reads what `resource.ParseQuantity` reads.
pub fn parse(text: &str) -> Result<Quantity, Invalid> {
    if text.is_empty() {
        return Err(Invalid::Syntax);
    }
    let (negative, unsigned) = match text.as_bytes().first() {
        Some(b'-') => (true, text.get(1..).unwrap_or_default()),
        Some(b'+') => (false, text.get(1..).unwrap_or_default()),
        _ => (false, text),
    };
    let (whole, rest) = digits(unsigned);
    let (fraction, rest) = rest.strip_prefix('.').map_or(("", rest), digits);
    let (form, exponent) = unit(rest)?;
    // A unit without a number counts as zero, except where the API server takes its slow path.
    let slow = if form == Form::Binary { exponent >= 50 } else { exponent < NANO };
    if whole.is_empty() && fraction.is_empty() && slow {
        return Err(Invalid::Syntax);
    }
    let quantity = match form {
        Form::Binary => binary(whole, fraction, exponent),
        Form::Decimal | Form::Exponent => decimal(whole, fraction, exponent, form)?,
    };
    Ok(if negative { Quantity { mantissa: -quantity.mantissa, ..quantity } } else { quantity })
}

fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()))
}

fn unit(text: &str) -> Result<(Form, i64), Invalid> {
    let find = |table: &[(&str, i64)]| table.iter().find(|(name, _)| *name == text).map(|(_, exponent)| *exponent);
    if let Some(exponent) = find(&DECIMAL) {
        return Ok((Form::Decimal, exponent));
    }
    if let Some(exponent) = find(&BINARY) {
        return Ok((Form::Binary, exponent));
    }
    let number = text.strip_prefix(['e', 'E']).ok_or(Invalid::Unit)?;
    let exponent: i64 = number.parse().map_err(|_| Invalid::Unit)?;
    // The API server keeps the low 32 bits, so that 1e4294967296 is 1.
    #[allow(clippy::cast_possible_truncation)]
    Ok((Form::Exponent, i64::from(exponent as i32)))
}

fn decimal(whole: &str, fraction: &str, exponent: i64, form: Form) -> Result<Quantity, Invalid> {
    let mut scale = exponent - len(fraction);
    let all = format!("{whole}{fraction}");
    let significant = all.trim_start_matches('0').trim_end_matches('0');
    scale += len(&all) - len(all.trim_end_matches('0'));
    if significant.is_empty() {
        return Ok(Quantity::new(0, 0, form));
    }
    // Whoever asks for something gets something: what is finer than a nano rounds up.
    let finer = usize::try_from(NANO - scale).unwrap_or(0);
    let kept = significant.get(..significant.len().saturating_sub(finer)).unwrap_or_default();
    if kept.len() > MAX_DIGITS {
        return Err(Invalid::Digits);
    }
    let mantissa = if kept.is_empty() { 0 } else { kept.parse::<i128>().map_err(|_| Invalid::Digits)? };
    Ok(Quantity::new(mantissa + i128::from(finer > 0), scale.max(NANO), form))
}

/// `whole.fraction · 2^exponent`, doubling digit by digit so that any length stays exact.
fn binary(whole: &str, fraction: &str, exponent: i64) -> Quantity {
    let cap = BINARY_CAP + 1;
    let mut units = whole.bytes().fold(0u128, |sum, digit| (sum * 10 + u128::from(digit - b'0')).min(cap));
    let mut rest: Vec<u8> = fraction.bytes().map(|digit| digit - b'0').collect();
    for _ in 0..exponent {
        let mut carry = 0;
        for digit in rest.iter_mut().rev() {
            let doubled = *digit * 2 + carry;
            (*digit, carry) = (doubled % 10, doubled / 10);
        }
        units = (units * 2 + u128::from(carry)).min(cap);
    }
    let (nanos, finer) = rest.split_at(rest.len().min(9));
    let mut fraction = nanos.iter().fold(0u128, |sum, digit| sum * 10 + u128::from(*digit));
    fraction *= 10u128.pow(9 - u32::try_from(nanos.len()).unwrap_or(9));
    fraction += u128::from(finer.iter().any(|digit| *digit != 0));
    let nanos = (units * NANOS + fraction).min(BINARY_CAP * NANOS);
    Quantity::new(i128::try_from(nanos).unwrap_or(i128::MAX), NANO, Form::Binary)
}

fn len(text: &str) -> i64 {
    i64::try_from(text.len()).unwrap_or(i64::MAX)
}

impl Quantity {
    fn new(mut mantissa: i128, mut scale: i64, form: Form) -> Self {
        while mantissa != 0 && mantissa % 10 == 0 {
            mantissa /= 10;
            scale += 1;
        }
        Self { mantissa, scale: if mantissa == 0 { 0 } else { scale }, form }
    }

    #[must_use]
    pub fn from_millis(millis: u64) -> Self {
        Self::new(i128::from(millis), -3, Form::Decimal)
    }

    /// Whole mebibytes print in binary units; other sizes are easier to read as plain bytes.
    #[must_use]
    pub fn from_bytes(bytes: u64) -> Self {
        let form = if bytes.is_multiple_of(1 << 20) { Form::Binary } else { Form::Decimal };
        Self::new(i128::from(bytes), 0, form)
    }

    /// Thousandths, rounded away from zero as the API server does; absent when a 64-bit number cannot hold them.
    #[must_use]
    pub fn millis(&self) -> Option<i64> {
        self.at_scale(-3)
    }

    /// Whole units, rounded away from zero as the API server does; absent when a 64-bit number cannot hold them.
    #[must_use]
    pub fn units(&self) -> Option<i64> {
        self.at_scale(0)
    }

    fn at_scale(&self, scale: i64) -> Option<i64> {
        let by = self.scale - scale;
        let power = u32::try_from(by.unsigned_abs()).ok().and_then(|exponent| 10i128.checked_pow(exponent));
        let value = match power {
            Some(power) if by >= 0 => self.mantissa.checked_mul(power)?,
            Some(power) => {
                let inexact = self.mantissa % power != 0;
                self.mantissa / power + i128::from(inexact) * self.mantissa.signum()
            }
            None if by < 0 => self.mantissa.signum(),
            None => return None,
        };
        i64::try_from(value).ok()
    }
}

/// Equal in value, however spelled.
impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        (self.mantissa, self.scale) == (other.mantissa, other.scale)
    }
}

impl Eq for Quantity {}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.mantissa == 0 {
            return f.write_str("0");
        }
        if let Some((number, suffix)) = self.binary_parts() {
            return write!(f, "{number}{suffix}");
        }
        let zeros = usize::try_from(self.scale.rem_euclid(3)).unwrap_or(0);
        let exponent = self.scale - self.scale.rem_euclid(3);
        write!(f, "{}{}", self.mantissa, "0".repeat(zeros))?;
        let known = DECIMAL.iter().find(|(_, e)| *e == exponent);
        match known {
            Some((suffix, _)) if self.form != Form::Exponent || exponent == 0 => f.write_str(suffix),
            _ => write!(f, "e{exponent}"),
        }
    }
}

impl Quantity {
    /// The number and its unit, where binary units lose nothing and gain something.
    fn binary_parts(&self) -> Option<(i128, &'static str)> {
        if self.form != Form::Binary || self.scale < 0 {
            return None;
        }
        let mut number = self.mantissa.checked_mul(10i128.checked_pow(u32::try_from(self.scale).ok()?)?)?;
        if number.abs() < 1024 {
            return None;
        }
        let mut suffix = "";
        for (next, _) in BINARY {
            if number % 1024 != 0 {
                break;
            }
            number /= 1024;
            suffix = next;
        }
        Some((number, suffix))
    }
}

#[cfg(test)]
mod tests;
