//! The path-and-query a warm-up asks for, and nothing that could name another host.
//!
//! Guarantees: the text starts with exactly one `/`, is printable ASCII, holds no `@`, no `\` and only whole percent
//! escapes. The request is built from a socket address and this, so no text can send it elsewhere.

use std::fmt::{self, Write as _};

/// Longer than any path a server takes; request lines of 8 KiB are refused by most of them.
pub const MAX_LEN: usize = 8 * 1024;

/// A path with its query, as it goes on the request line.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Endpoint(String);

/// Why a text is no endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("must be a path, not an absolute URL; the host is always the pod")]
    Absolute,
    #[error("must not contain '@'; write %40")]
    At,
    #[error("must not contain a backslash; write %5C")]
    Backslash,
    #[error("must not contain control characters")]
    Control,
    #[error("'%' must be followed by two hexadecimal digits; write %25 for the sign itself")]
    Escape,
    #[error("must not be longer than {MAX_LEN} bytes")]
    Length,
}

impl Default for Endpoint {
    fn default() -> Self {
        Self("/".to_owned())
    }
}

impl Endpoint {
    /// Reads a path; what URLs cannot carry as it stands is percent-encoded, a fragment is never sent.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        if text.chars().any(char::is_control) {
            return Err(Invalid::Control);
        }
        if text.len() > MAX_LEN {
            return Err(Invalid::Length);
        }
        let text = text.split('#').next().unwrap_or_default();
        if text.contains('@') {
            return Err(Invalid::At);
        }
        if text.contains('\\') {
            return Err(Invalid::Backslash);
        }
        if names_a_host(text) {
            return Err(Invalid::Absolute);
        }
        if !escapes_are_whole(text) {
            return Err(Invalid::Escape);
        }
        let encoded = encode(text);
        if encoded.len() > MAX_LEN {
            return Err(Invalid::Length);
        }
        Ok(Self(encoded))
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `scheme:…`, `host:port/…` and `//host/…`; a colon behind the first slash or in the query is only a character.
fn names_a_host(text: &str) -> bool {
    let first = text.split(['/', '?']).next().unwrap_or_default();
    text.starts_with("//") || first.contains(':')
}

fn escapes_are_whole(text: &str) -> bool {
    text.split('%').skip(1).all(|after| {
        let digits = after.as_bytes().get(..2);
        digits.is_some_and(|pair| pair.iter().all(u8::is_ascii_hexdigit))
    })
}

fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 1);
    if !text.starts_with('/') {
        out.push('/');
    }
    for byte in text.bytes() {
        match byte {
            b' ' | b'"' | b'<' | b'>' | b'^' | b'`' | b'{' | b'|' | b'}' | 0x7f.. => {
                // Writing to a String cannot fail.
                let _ = write!(out, "%{byte:02X}");
            }
            _ => out.push(char::from(byte)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("/", "/")]
    #[case("", "/")]
    #[case("warm", "/warm")]
    #[case("/a/b?c=d&e=http://f:1/g", "/a/b?c=d&e=http://f:1/g")]
    #[case("?q=1", "/?q=1")]
    #[case("/a b", "/a%20b")]
    #[case("/größe", "/gr%C3%B6%C3%9Fe")]
    #[case("/a%2Fb", "/a%2Fb")]
    #[case("/a#frag", "/a")]
    #[case("/http://evil/", "/http://evil/")]
    #[case("/../..", "/../..")]
    #[case("/{id}", "/%7Bid%7D")]
    fn paths_are_taken(#[case] text: &str, #[case] expected: &str) {
        assert_eq!(Endpoint::parse(text).unwrap().as_str(), expected);
    }

    #[rstest]
    #[case("http://evil/", Invalid::Absolute)]
    #[case("HTTP://evil/", Invalid::Absolute)]
    #[case("http:evil", Invalid::Absolute)]
    #[case("evil:80/x", Invalid::Absolute)]
    #[case("//evil/", Invalid::Absolute)]
    #[case("///evil/", Invalid::Absolute)]
    #[case("@evil", Invalid::At)]
    #[case("/@evil", Invalid::At)]
    #[case("http://a@evil/", Invalid::At)]
    #[case("/a\r\nHost: evil", Invalid::Control)]
    #[case("/a\tb", Invalid::Control)]
    #[case("/a\u{7f}", Invalid::Control)]
    #[case("/a\u{85}", Invalid::Control)]
    #[case("\\\\evil", Invalid::Backslash)]
    #[case("/%", Invalid::Escape)]
    #[case("/%4", Invalid::Escape)]
    #[case("/%zz", Invalid::Escape)]
    #[case("/%4%20", Invalid::Escape)]
    fn what_could_lead_elsewhere_is_refused(#[case] text: &str, #[case] why: Invalid) {
        assert_eq!(Endpoint::parse(text), Err(why));
    }

    #[test]
    fn length_counts_as_sent() {
        let fits = format!("/{}", "a".repeat(MAX_LEN - 1));
        assert!(Endpoint::parse(&fits).is_ok());
        assert_eq!(Endpoint::parse(&format!("{fits}a")), Err(Invalid::Length));
        assert_eq!(Endpoint::parse(&format!("/{}", " ".repeat(MAX_LEN / 2))), Err(Invalid::Length));
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_safe_and_stable(text in "\\PC{0,60}|[/a-z:@%#?\\\\ \\r\\n.]{0,40}") {
            if let Ok(endpoint) = Endpoint::parse(&text) {
                let sent = endpoint.as_str();
                prop_assert!(sent.starts_with('/') && !sent.starts_with("//"));
                prop_assert!(sent.bytes().all(|b| (0x21..0x7f).contains(&b)));
                prop_assert!(!sent.contains(['@', '\\', '#']));
                prop_assert_eq!(Endpoint::parse(sent).unwrap(), endpoint);
            }
        }
    }
}
