//! Asks a server what a method takes: `grpc.reflection.v1`, or `v1alpha` on older ones.
//!
//! The protocol is a stream, but one question per stream with one answer is all that is needed, and that is what a
//! unary call looks like on the wire.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use groundcrew_core::warmup::rules::GrpcMethod;
use prost::Message;
use prost_reflect::prost_types::FileDescriptorProto;
use prost_reflect::{DescriptorPool, MessageDescriptor};
use tokio::time::Instant;

use super::{UNIMPLEMENTED, unary, unframe};
use crate::call::Expect;
use crate::client::Client;
use crate::report::Failure;

const SERVICES: [&str; 2] = [
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];
/// Files a method may import, directly or not. Real ones need a few dozen.
const MAX_FILES: usize = 200;
/// All answers together. Decoded, a description can take more than a hundred times its length in memory.
const MAX_BYTES: usize = 256 * 1024;

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the server has no reflection")]
    Absent,
    #[error("the server's reflection does not know it")]
    Unknown,
    #[error("asking the server's reflection failed: {0}")]
    Failed(Failure),
    #[error("the server's reflection answered with something else")]
    Garbled,
    #[error("it needs more than {MAX_FILES} files to describe")]
    TooMany,
    #[error("its description is longer than {MAX_BYTES} bytes")]
    TooLong,
    #[error("its description is not consistent: {0}")]
    Inconsistent(#[from] prost_reflect::DescriptorError),
    #[error("it is a streaming method; only unary calls warm up")]
    Streaming,
}

#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(string, tag = "3")]
    file_by_filename: String,
    #[prost(string, tag = "4")]
    file_containing_symbol: String,
}

#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(message, optional, tag = "4")]
    files: Option<Files>,
    #[prost(message, optional, tag = "7")]
    error: Option<ErrorResponse>,
}

#[derive(Clone, PartialEq, Message)]
struct Files {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    file_descriptor_proto: Vec<bytes::Bytes>,
}

#[derive(Clone, PartialEq, Message)]
struct ErrorResponse {
    #[prost(int32, tag = "1")]
    error_code: i32,
}

/// One file as it came. Only this is kept between questions; decoded it is when all are there.
struct File {
    name: String,
    imports: Vec<String>,
    encoded: Bytes,
}

impl File {
    fn of(encoded: Bytes) -> Result<Self, Error> {
        let file = FileDescriptorProto::decode(encoded.clone()).map_err(|_| Error::Garbled)?;
        Ok(Self { name: file.name().to_owned(), imports: file.dependency, encoded })
    }
}

/// The message that the method takes. `within` is for one question, `end` for all of them.
pub(super) async fn find(
    client: &Arc<Client>,
    method: &GrpcMethod,
    within: Duration,
    end: Instant,
) -> Result<MessageDescriptor, Error> {
    for service in SERVICES {
        let mut asker = Asker { client, service, within, end, room: MAX_BYTES };
        match asker.files_of(&method.service).await {
            Err(Error::Absent) => {}
            Err(e) => return Err(e),
            Ok(files) => return input_of(files, method),
        }
    }
    Err(Error::Absent)
}

fn input_of(files: Vec<File>, method: &GrpcMethod) -> Result<MessageDescriptor, Error> {
    let decoded = files.into_iter().map(|file| FileDescriptorProto::decode(file.encoded));
    let decoded: Vec<_> = decoded.collect::<Result<_, _>>().map_err(|_| Error::Garbled)?;
    let mut pool = DescriptorPool::new();
    pool.add_file_descriptor_protos(decoded)?;
    let service = pool.get_service_by_name(&method.service).ok_or(Error::Unknown)?;
    let found = service.methods().find(|m| m.name() == method.method).ok_or(Error::Unknown)?;
    if found.is_client_streaming() || found.is_server_streaming() {
        return Err(Error::Streaming);
    }
    Ok(found.input())
}

struct Asker<'a> {
    client: &'a Arc<Client>,
    service: &'static str,
    within: Duration,
    end: Instant,
    /// How many bytes it may still answer.
    room: usize,
}

impl Asker<'_> {
    /// The file with the service, and every file it imports.
    async fn files_of(&mut self, service: &str) -> Result<Vec<File>, Error> {
        let first = Request { file_containing_symbol: service.to_owned(), ..Request::default() };
        let mut files = self.ask(&first).await?;
        loop {
            let have: BTreeSet<&str> = files.iter().map(|file| file.name.as_str()).collect();
            let mut imports = files.iter().flat_map(|file| &file.imports);
            let Some(missing) = imports.find(|name| !have.contains(name.as_str())).cloned() else { break };
            let answer = self.ask(&Request { file_by_filename: missing.clone(), ..Request::default() }).await?;
            let new: Vec<_> = answer.into_iter().filter(|file| !have.contains(file.name.as_str())).collect();
            if !new.iter().any(|file| file.name == missing) {
                return Err(Error::Garbled);
            }
            files.extend(new);
            if files.len() > MAX_FILES {
                return Err(Error::TooMany);
            }
        }
        Ok(files)
    }

    async fn ask(&mut self, question: &Request) -> Result<Vec<File>, Error> {
        // Only the field that is asked for may be on the wire: the two are one-of.
        let call = unary(self.service, &question.encode_to_vec(), Expect::Grpc).ok_or(Error::Garbled)?;
        let within = self.within.min(self.end.saturating_duration_since(Instant::now()));
        let answer = self
            .client
            .send(&call, within, true)
            .await
            .map_err(|failure| if failure == UNIMPLEMENTED { Error::Absent } else { Error::Failed(failure) })?;
        self.room = self.room.checked_sub(answer.body.len()).ok_or(Error::TooLong)?;
        let message = unframe(&answer.body).ok_or(Error::Garbled)?;
        let response = Response::decode(message).map_err(|_| Error::Garbled)?;
        if response.error.is_some() {
            return Err(Error::Unknown);
        }
        let files = response.files.ok_or(Error::Garbled)?.file_descriptor_proto;
        files.into_iter().map(File::of).collect()
    }
}
