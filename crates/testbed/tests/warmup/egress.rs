//! Nothing in an annotation, a config or an answer leads a request to anyone but the pod.

use groundcrew_testbed::{Cluster, Layer};
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use serde_json::json;

use crate::configs::{create, install};
use crate::support::{NODE, Reply, SOON, Server, add_node, agent, asking, is_open, message, reason, up};

#[tokio::test(flavor = "multi_thread")]
async fn no_annotation_config_or_answer_leads_to_another_server() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    add_node(&cluster, NODE).await?;
    install(&cluster).await?;
    let _agent = agent(&cluster, "agent").await?;
    let namespace = cluster.namespace("egress").await?;
    let pods: Api<Pod> = namespace.api();
    let (own, evil) = (Server::start().await?, Server::start().await?);
    let host = evil.address.to_string();

    let long = format!("/{}", "x".repeat(8 * 1024));
    let refused = [
        (format!("http://{host}/"), "not an absolute URL"),
        (format!("{host}/"), "not an absolute URL"),
        (format!("//{host}/"), "not an absolute URL"),
        (format!("@{host}/"), "must not contain '@'"),
        (format!("/@{host}/"), "must not contain '@'"),
        (format!("\\\\{host}/"), "must not contain a backslash"),
        (format!("/\r\nHost: {host}\r\n\r\nGET /"), "must not contain control characters"),
        ("/%0".to_owned(), "'%' must be followed by two hexadecimal digits"),
        (long, "must not be longer than 8192 bytes"),
    ];
    for (i, (endpoint, why)) in refused.iter().enumerate() {
        let name = format!("endpoint-{i}");
        up(&pods, asking(&name, &own, &[("endpoint", endpoint)])).await?;
        let opened = cluster.wait_for(&pods, &name, "gate open", SOON, is_open).await?;
        assert_eq!(reason(&opened), "WarmupFailedOpen");
        assert!(message(&opened).contains(why), "{}", message(&opened));
    }
    assert_eq!((own.hits().len(), evil.hits().len()), (0, 0), "no request for what is refused");

    let quick = [("requests", "2"), ("mode", "asap"), ("duration", "20s")];
    for status in [301, 302, 307, 308] {
        let headers =
            format!("location: http://{host}/\r\nrefresh: 0; url=http://{host}/\r\nalt-svc: h2=\"{host}\"\r\n");
        let sends = Server::telling(move |_, _| Some(Reply { status, headers: headers.clone(), text: String::new() }));
        let sends = sends.await?;
        let name = format!("redirect-{status}");
        up(&pods, asking(&name, &sends, &quick)).await?;
        let warm = cluster.wait_for(&pods, &name, "gate open", SOON, is_open).await?;
        assert_eq!((reason(&warm), sends.hits().len()), ("WarmupComplete", 2), "a redirect is an answer");
    }

    // What a server answers becomes a path of a later request, or none at all.
    let spec = json!({"steps": [{"name": "s", "requests": [
        {"name": "first", "extract": {"next": "$.next"}}, {"name": "second", "endpoint": "{{next}}"},
    ]}]});
    create(&cluster, namespace.name(), "follow", spec).await?;
    for (i, next) in [format!("http://{host}/"), format!("//{host}/"), format!("@{host}/")].into_iter().enumerate() {
        let body = json!({"next": next}).to_string();
        let lying = Server::answering(move |_, _| (200, body.clone())).await?;
        let name = format!("follow-{i}");
        up(&pods, asking(&name, &lying, &[("config", "follow")])).await?;
        let opened = cluster.wait_for(&pods, &name, "gate open", SOON, is_open).await?;
        assert_eq!((reason(&opened), lying.hits().len()), ("WarmupFailedOpen", 1), "{}", message(&opened));
    }
    assert_eq!(evil.hits().len(), 0);
    Ok(())
}
