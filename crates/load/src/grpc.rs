//! Unary gRPC calls on the same HTTP/2 connections: the health service, or a method found by server reflection.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use groundcrew_core::warmup::rules::GrpcMethod;
use http::Method;
use prost::Message;
use prost_reflect::DynamicMessage;
use tokio::time::Instant;

use crate::call::{Call, Expect};
use crate::client::Client;
use crate::report::Failure;

mod reflection;

const HEALTH: &str = "/grpc.health.v1.Health/Check";
const SERVING: i32 = 1;
/// One byte of flags, four of length.
const PREFIX: usize = 5;

#[derive(Clone, PartialEq, Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// Builds the call once; what it takes to find the method out is not part of the warm-up's count, but of its time: each
/// question may take `within`, and all of them last until `end`.
pub async fn prepare(
    client: &Arc<Client>,
    method: Option<&GrpcMethod>,
    payload: &str,
    within: Duration,
    end: Instant,
) -> Result<Call, String> {
    let Some(method) = method else {
        return unary(HEALTH, &[], Expect::Serving).ok_or_else(|| "no health call".to_owned());
    };
    let path = format!("/{method}");
    let input = match reflection::find(client, method, within, end).await {
        Ok(input) => Some(input),
        Err(reflection::Error::Absent) => None,
        Err(e) => return Err(format!("{method}: {e}")),
    };
    let message = encode(input, payload).map_err(|e| format!("{method}: {e}"))?;
    unary(&path, &message, Expect::Grpc).ok_or_else(|| format!("{method} is no method name"))
}

/// JSON becomes the method's message. An empty message needs no description.
fn encode(input: Option<prost_reflect::MessageDescriptor>, payload: &str) -> Result<Vec<u8>, String> {
    let Some(input) = input else {
        return match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(payload) {
            Ok(fields) if fields.is_empty() => Ok(Vec::new()),
            _ => Err("the server has no reflection, so only an empty payload can be sent".to_owned()),
        };
    };
    let name = input.full_name().to_owned();
    let mut json = serde_json::Deserializer::from_str(payload);
    let message =
        DynamicMessage::deserialize(input, &mut json).map_err(|e| format!("the payload is no {name}: {e}"))?;
    json.end().map_err(|e| format!("the payload is no {name}: {e}"))?;
    Ok(message.encode_to_vec())
}

fn unary(path: &str, message: &[u8], expect: Expect) -> Option<Call> {
    let mut call = Call::new(Method::POST, path, frame(message), expect)?;
    let set = call.header("content-type", "application/grpc") && call.header("te", "trailers");
    set.then_some(call)
}

/// Not compressed, then its length, then itself.
fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(PREFIX + message.len());
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// The first message of a response; a compressed one was not asked for and is not read.
fn unframe(body: &Bytes) -> Option<Bytes> {
    let (prefix, _) = body.split_first_chunk::<PREFIX>()?;
    let [flags, length @ ..] = *prefix;
    let end = PREFIX.checked_add(usize::try_from(u32::from_be_bytes(length)).ok()?)?;
    (flags == 0 && end <= body.len()).then(|| body.slice(PREFIX..end))
}

pub(crate) fn says_serving(body: &Bytes) -> bool {
    let message = unframe(body).and_then(|message| HealthCheckResponse::decode(message).ok());
    message.is_some_and(|response| response.status == SERVING)
}

/// gRPC's word for "no such method here".
const UNIMPLEMENTED: Failure = Failure::Grpc(12);
