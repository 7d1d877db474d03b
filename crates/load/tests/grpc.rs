//! gRPC against a real tonic server: health, reflection in both versions, and without any.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use prost::Message;
use prost_reflect::prost_types::field_descriptor_proto::{Label, Type};
use prost_reflect::prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto,
    ServiceDescriptorProto,
};
use support::{listener, run};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::service::Routes;
use tonic::{Request, Response, Status};

#[derive(Clone, PartialEq, Message)]
struct Hello {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int32, tag = "2")]
    times: i32,
}

/// `demo.Greeter/Say`, which remembers what it was sent.
#[derive(Clone, Default)]
struct Greeter(Arc<Mutex<Vec<Hello>>>);

impl NamedService for Greeter {
    const NAME: &'static str = "demo.Greeter";
}

impl UnaryService<Hello> for Greeter {
    type Response = Hello;
    type Future = BoxFuture<Response<Hello>, Status>;

    fn call(&mut self, request: Request<Hello>) -> Self::Future {
        assert_eq!(request.metadata().get("x-warmup-request").unwrap(), "true");
        let seen = self.0.clone();
        Box::pin(async move {
            let hello = request.into_inner();
            seen.lock().unwrap().push(hello.clone());
            if hello.name == "nobody" { Err(Status::not_found("who?")) } else { Ok(Response::new(hello)) }
        })
    }
}

impl Service<http::Request<Body>> for Greeter {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let greeter = self.clone();
        Box::pin(async move {
            let codec = tonic_prost::ProstCodec::<Hello, Hello>::default();
            Ok(Grpc::new(codec).unary(greeter, request).await)
        })
    }
}

/// What protoc would have written, in two files so that an import has to be followed.
fn description() -> FileDescriptorSet {
    let field = |name: &str, number, kind: Type| FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(Label::Optional as i32),
        r#type: Some(kind as i32),
        ..Default::default()
    };
    let message = DescriptorProto {
        name: Some("Hello".to_owned()),
        field: vec![field("name", 1, Type::String), field("times", 2, Type::Int32)],
        ..Default::default()
    };
    let method = |name: &str, streaming| MethodDescriptorProto {
        name: Some(name.to_owned()),
        input_type: Some(".demo.Hello".to_owned()),
        output_type: Some(".demo.Hello".to_owned()),
        server_streaming: Some(streaming),
        ..Default::default()
    };
    let service = ServiceDescriptorProto {
        name: Some("Greeter".to_owned()),
        method: vec![method("Say", false), method("Sing", true)],
        ..Default::default()
    };
    let file = |name: &str| FileDescriptorProto {
        name: Some(name.to_owned()),
        package: Some("demo".to_owned()),
        syntax: Some("proto3".to_owned()),
        ..Default::default()
    };
    let messages = FileDescriptorProto { message_type: vec![message], ..file("hello.proto") };
    let services = FileDescriptorProto {
        service: vec![service],
        dependency: vec!["hello.proto".to_owned()],
        ..file("greeter.proto")
    };
    FileDescriptorSet { file: vec![messages, services] }
}

#[derive(Clone, Copy, PartialEq)]
enum Reflection {
    V1,
    V1alpha,
    None,
}

async fn serve(greeter: Greeter, reflection: Reflection) -> SocketAddr {
    let encoded = description().encode_to_vec();
    let builder = tonic_reflection::server::Builder::configure().register_encoded_file_descriptor_set(&encoded);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let routes = Routes::new(greeter).add_service(health);
    let routes = match reflection {
        Reflection::V1 => routes.add_service(builder.build_v1().unwrap()),
        Reflection::V1alpha => routes.add_service(builder.build_v1alpha().unwrap()),
        Reflection::None => routes,
    };
    let listener = listener("127.0.0.1").await;
    let address = listener.local_addr().unwrap();
    let service = hyper_util::service::TowerToHyperService::new(routes.prepare());
    tokio::spawn(async move {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let service = service.clone();
            tokio::spawn(async move {
                let io = hyper_util::rt::TokioIo::new(tcp);
                let builder = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
                let _ = builder.serve_connection(io, service).await;
            });
        }
    });
    address
}

const GRPC: [(&str, &str); 3] = [("protocol", "grpc"), ("requests", "4"), ("mode", "asap")];

fn with(extra: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    [&GRPC[..], extra].concat()
}

#[tokio::test]
async fn without_a_method_the_health_service_is_asked() {
    let address = serve(Greeter::default(), Reflection::None).await;
    let ran = run(address, &GRPC).await;
    assert_eq!((ran.tally().sent, ran.tally().succeeded), (4, 4), "{:?}", ran.tally());
}

#[tokio::test]
async fn a_method_is_called_with_its_json_payload_by_either_reflection() {
    for reflection in [Reflection::V1, Reflection::V1alpha] {
        let greeter = Greeter::default();
        let address = serve(greeter.clone(), reflection).await;
        let payload = [("grpc-method", "demo.Greeter/Say"), ("grpc-payload", r#"{"name": "warm", "times": 3}"#)];
        let ran = run(address, &with(&payload)).await;
        assert_eq!((ran.tally().sent, ran.tally().succeeded), (4, 4), "{:?}", ran.tally());
        assert_eq!(*greeter.0.lock().unwrap(), vec![Hello { name: "warm".to_owned(), times: 3 }; 4]);
    }
}

#[tokio::test]
async fn a_grpc_status_is_a_failure_with_its_name() {
    let address = serve(Greeter::default(), Reflection::V1).await;
    let ran =
        run(address, &with(&[("grpc-method", "demo.Greeter/Say"), ("grpc-payload", r#"{"name": "nobody"}"#)])).await;
    assert_eq!(ran.tally().failure.as_deref(), Some("gRPC status NOT_FOUND (4)"));
}

#[tokio::test]
async fn without_reflection_only_an_empty_payload_can_be_sent() {
    let greeter = Greeter::default();
    let address = serve(greeter.clone(), Reflection::None).await;
    let ran = run(address, &with(&[("grpc-method", "demo.Greeter/Say")])).await;
    assert_eq!((ran.tally().succeeded, greeter.0.lock().unwrap().len()), (4, 4));
    let ran = run(address, &with(&[("grpc-method", "demo.Greeter/Say"), ("grpc-payload", r#"{"name": "x"}"#)])).await;
    let why = "demo.Greeter/Say: the server has no reflection, so only an empty payload can be sent";
    assert_eq!(ran.unable(), why);
}

#[tokio::test]
async fn what_cannot_be_called_is_explained() {
    let address = serve(Greeter::default(), Reflection::V1).await;
    for (method, payload, why) in [
        ("demo.Greeter/Sing", "{}", "demo.Greeter/Sing: it is a streaming method; only unary calls warm up"),
        ("demo.Greeter/Shout", "{}", "demo.Greeter/Shout: the server's reflection does not know it"),
        ("demo.Nobody/Say", "{}", "demo.Nobody/Say: "),
        ("demo.Greeter/Say", r#"{"nam": "x"}"#, "demo.Greeter/Say: the payload is no demo.Hello: "),
    ] {
        let ran = run(address, &with(&[("grpc-method", method), ("grpc-payload", payload)])).await;
        assert!(ran.unable().starts_with(why), "{}", ran.unable());
    }
}

#[tokio::test]
async fn a_server_that_is_no_grpc_server_fails_by_name() {
    let server = support::serve(|_, _| support::reply(200, "hello")).await;
    let ran = run(server.address, &GRPC).await;
    assert_eq!(ran.tally().failure.as_deref(), Some("not the protocol asked for (4)"));
}
