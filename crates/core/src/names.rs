//! What the API server takes as a name, and as a key or a value of a label or a taint.

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

/// What follows a key's slash; at least one character.
#[must_use]
pub fn is_word(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63 && text.chars().all(inner) && edge(text.chars().next()) && edge(text.chars().last())
}

#[must_use]
pub fn is_domain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_label)
}

/// One part of a domain; the name of a namespace or of a Service.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    is_word(text) && !text.contains(|c: char| c.is_ascii_uppercase() || "_.".contains(c))
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
