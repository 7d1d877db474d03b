//! One request as it goes on the wire, built from parts that were checked before.

use std::fmt;

use bytes::Bytes;
use groundcrew_core::warmup::endpoint::Endpoint;
use http::header::{HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use http::uri::PathAndQuery;
use http::{Method, Request, Uri, Version};
use http_body_util::Full;

use crate::client::Target;

const AGENT: HeaderValue = HeaderValue::from_static("kube-booster/1.0");
const WARMUP: HeaderName = HeaderName::from_static("x-warmup-request");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What to send, as often as asked.
#[derive(Clone, Debug)]
pub struct Call {
    pub method: Method,
    path: PathAndQuery,
    headers: HeaderMap,
    body: Bytes,
    pub expect: Expect,
}

/// What counts as success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// A final status of 200–399.
    Answer,
    Status(u16),
    /// gRPC status OK.
    Grpc,
    /// gRPC status OK, and the health service says SERVING.
    Serving,
}

impl Call {
    /// A plain GET of the path.
    #[must_use]
    pub fn get(endpoint: &Endpoint) -> Option<Self> {
        Self::new(Method::GET, endpoint.as_str(), Bytes::new(), Expect::Answer)
    }

    /// Nothing if the path is none; an [`Endpoint`] always is one.
    pub(crate) fn new(method: Method, path: &str, body: Bytes, expect: Expect) -> Option<Self> {
        let path = path.parse().ok()?;
        let mut headers = HeaderMap::new();
        headers.insert(USER_AGENT, AGENT);
        headers.insert(WARMUP, HeaderValue::from_static("true"));
        Some(Self { method, path, headers, body, expect })
    }

    /// Adds a header; false if it is none.
    pub(crate) fn header(&mut self, name: &str, value: &str) -> bool {
        match (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            (Ok(name), Ok(value)) => {
                self.headers.insert(name, value);
                true
            }
            _ => false,
        }
    }

    /// HTTP/2 names the authority in the URI, HTTP/1.1 in the Host header.
    pub(crate) fn request(&self, target: &Target, version: Version, trace: &Trace) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.version_mut() = version;
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(TRACEPARENT, trace.next());
        *request.uri_mut() = self.uri(target, version);
        if version < Version::HTTP_2
            && !request.headers().contains_key(HOST)
            && let Ok(host) = HeaderValue::try_from(target.address.to_string())
        {
            request.headers_mut().insert(HOST, host);
        }
        request
    }

    fn uri(&self, target: &Target, version: Version) -> Uri {
        if version < Version::HTTP_2 {
            return Uri::from(self.path.clone());
        }
        let named = self.headers.get(HOST).and_then(|host| host.to_str().ok());
        let authority = named.map_or_else(|| target.address.to_string(), str::to_owned);
        let built = Uri::builder().scheme(target.scheme()).authority(authority).path_and_query(self.path.clone());
        built.build().unwrap_or_else(|_| Uri::from(self.path.clone()))
    }
}

/// One trace per warm-up, one span per request, so that they are found, or left out, in the user's tracing.
#[derive(Clone, Copy, Debug)]
pub struct Trace(u128);

impl Trace {
    /// All zeros is the one value W3C forbids.
    #[must_use]
    pub fn new(random: u128) -> Self {
        Self(random.max(1))
    }

    fn next(self) -> HeaderValue {
        let text = format!("00-{:032x}-{:016x}-01", self.0, fastrand::u64(1..));
        HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
