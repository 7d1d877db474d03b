//! What the API server takes as a key or a value of a label or a taint.

/// A name, perhaps with a domain and a slash before it.
#[must_use]
pub fn is_qualified(text: &str) -> bool {
    let (domain, name) = text.split_once('/').map_or((None, text), |(domain, name)| (Some(domain), name));
    domain.is_none_or(is_domain) && is_word(name)
}

/// What may follow a key's equals sign.
#[must_use]
pub fn is_value(text: &str) -> bool {
    text.is_empty() || is_word(text)
}

fn is_word(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63 && text.chars().all(inner) && edge(text.chars().next()) && edge(text.chars().last())
}

fn is_domain(text: &str) -> bool {
    let part = |part: &str| is_word(part) && !part.contains(|c: char| c.is_ascii_uppercase() || c == '_');
    text.len() <= 253 && text.split('.').all(part)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("gpu", true)]
    #[case("example.com/gpu_driver.v2", true)]
    #[case("", false)]
    #[case("example.com/", false)]
    #[case("/gpu", false)]
    #[case("a/b/c", false)]
    #[case("Example.com/gpu", false)]
    #[case("example..com/gpu", false)]
    #[case("example.com/-gpu", false)]
    #[case("gpu driver", false)]
    fn keys_are_judged_as_the_api_server_judges_them(#[case] key: &str, #[case] good: bool) {
        assert_eq!(is_qualified(key), good);
    }

    #[rstest]
    #[case("".to_owned(), true)]
    #[case("wait".to_owned(), true)]
    #[case("a".repeat(63), true)]
    #[case("a".repeat(64), false)]
    #[case("not yet".to_owned(), false)]
    #[case("wait-".to_owned(), false)]
    fn values_are_judged_as_the_api_server_judges_them(#[case] value: String, #[case] good: bool) {
        assert_eq!(is_value(&value), good);
    }
}
