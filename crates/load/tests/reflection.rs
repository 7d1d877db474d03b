//! Servers whose reflection never comes to an end: bounded in time and memory like every other answer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::time::Duration;

use bytes::Bytes;
use groundcrew_core::warmup::scenario::Scenario;
use http_body_util::Full;
use prost::Message;
use prost_reflect::prost_types::{DescriptorProto, FileDescriptorProto};
use support::{Reply, Server, run, run_with};
use tokio_util::sync::CancellationToken;

const GRPC: [(&str, &str); 3] = [("protocol", "grpc"), ("grpc-method", "demo.Greeter/Say"), ("timeout", "2s")];

#[derive(Clone, PartialEq, Message)]
struct Files {
    #[prost(bytes = "vec", repeated, tag = "1")]
    file_descriptor_proto: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct Response {
    #[prost(message, optional, tag = "4")]
    files: Option<Files>,
}

/// The n-th answer is a file that imports the next one.
fn answer(number: usize, messages: usize) -> Reply {
    let file = FileDescriptorProto {
        name: Some(format!("f{number}")),
        dependency: vec![format!("f{}", number + 1)],
        message_type: vec![DescriptorProto::default(); messages],
        ..FileDescriptorProto::default()
    };
    let files = Files { file_descriptor_proto: vec![file.encode_to_vec()] };
    let message = Response { files: Some(files) }.encode_to_vec();
    let prefix = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = Bytes::from([&[0], &prefix[..], &message].concat());
    http::Response::builder().header("grpc-status", "0").body(Full::new(body)).unwrap()
}

async fn dripping() -> Server {
    support::serve(|number, _| {
        std::thread::sleep(Duration::from_millis(300));
        answer(number, 1)
    })
    .await
}

#[tokio::test]
async fn a_description_of_many_small_parts_is_not_decoded_beyond_its_limit() {
    // Two bytes each on the wire, some hundred in memory.
    let server = support::serve(|number, _| answer(number, 50_000)).await;
    // Its own limit ends it, not the time.
    let ran = run(server.address, &GRPC[..2]).await;
    assert_eq!(ran.unable(), "demo.Greeter/Say: its description is longer than 262144 bytes");
    assert_eq!(server.hits().len(), 3, "all answers count together");
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_a_method_up_ends_with_the_time_of_the_warm_up() {
    let ran = run(dripping().await.address, &GRPC).await;
    assert_eq!(ran.unable(), "demo.Greeter/Say: asking the server's reflection failed: timed out");
    assert!(ran.took >= Duration::from_secs(1) && ran.took < Duration::from_secs(10), "{:?}", ran.took);
}

#[tokio::test(flavor = "multi_thread")]
async fn looking_a_method_up_ends_with_the_time_of_the_step() {
    let spec = serde_json::json!({"steps": [{"name": "s", "timeout": "1s", "requests": [
        {"name": "r", "protocol": "grpc", "grpcMethod": "demo.Greeter/Say"},
    ]}]});
    let scenario = Scenario::read(&serde_json::from_value(spec).unwrap()).unwrap();
    let ran = run_with(dripping().await.address, &[], Some(&scenario), &CancellationToken::new()).await;
    assert!(ran.unable().ends_with("asking the server's reflection failed: timed out"), "{}", ran.unable());
    assert!(ran.took < Duration::from_secs(10), "{:?}", ran.took);
}
