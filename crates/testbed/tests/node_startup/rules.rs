//! Rules of the cluster's own, from their schema to their last taint.

use groundcrew::node_startup::crd::NodeStartupRule;
use groundcrew_testbed::objects::{create, is_established, sample};
use groundcrew_testbed::{Cluster, Groundcrew, Layer};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::births::{births_are_free, births_carry};
use crate::support::*;

pub async fn install(cluster: &Cluster) -> anyhow::Result<Api<NodeStartupRule>> {
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let created = definitions.create(&PostParams::default(), &NodeStartupRule::crd()).await?;
    cluster.wait_for(&definitions, &created.name_any(), "served", SOON, is_established).await?;
    Ok(Api::all(cluster.client()))
}

pub fn rule(name: &str, spec: Value) -> NodeStartupRule {
    parse(
        json!({"apiVersion": "groundcrew.io/v1alpha1", "kind": "NodeStartupRule", "metadata": {"name": name}, "spec": spec}),
    )
}

fn condition<'r>(rule: &'r NodeStartupRule, kind: &str) -> Option<(&'r str, &'r str)> {
    let condition = rule.status.as_ref()?.conditions.iter().find(|c| c.type_ == kind)?;
    Some((condition.status.as_str(), condition.message.as_str()))
}

fn accepted(rule: &NodeStartupRule) -> Option<(&str, &str)> {
    condition(rule, "Accepted")
}

fn carries(node: &k8s_openapi::api::core::v1::Node, key: &str) -> bool {
    keys(node).contains(&key)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_sample_is_accepted_by_the_api_server_and_by_groundcrew() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let rules = install(&cluster).await?;
    let _groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("engine: none")).start().await?;
    let mut seen = 0;
    for name in [
        "init-daemonset.yaml",
        "image-prepull.yaml",
        "two-phases.yaml",
        "gpu-driver.yaml",
        "cni.yaml",
        "expression.yaml",
    ] {
        let mut documents = sample(&format!("node_startup/{name}"))?;
        // The namespace has to be there before what lives in it.
        documents.sort_by_key(|d| d["kind"] != "Namespace");
        for document in documents {
            seen += 1;
            create(&cluster.client(), document).await?;
        }
    }
    assert!(seen >= 8);
    for name in ["gpu-driver", "agents", "storage"] {
        let rule = cluster.wait_for(&rules, name, "judged", SOON, |r| accepted(r).is_some()).await?;
        assert_eq!(accepted(&rule), Some(("True", "")), "{name}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_holds_its_nodes_until_its_evidence_is_there_and_leaves_no_taint() -> anyhow::Result<()> {
    const TAINT: &str = "startup-taint.cluster-autoscaler.kubernetes.io/gpu";
    let cluster = Cluster::start(Layer::Api).await?;
    let rules = install(&cluster).await?;
    let yaml = config("builtIn: false\noperatorTolerates: [example.com/told]");
    let mut groundcrew = Groundcrew::builder(&cluster).config_yaml(&yaml).start().await?;
    engine(&groundcrew, "policy").await?;
    let driver = init_set(&cluster, "driver", "none", json!({})).await?;
    let spec = json!({
        "nodeSelector": {"matchLabels": {"gpu": "yes"}},
        "evidence": {"daemonSets": [{"namespace": "kube-system", "name": "driver"}], "conditions": [{"type": "GPUReady", "status": "True"}]},
    });
    rules.create(&PostParams::default(), &rule("gpu", spec)).await?;
    let mut born = create_node(&cluster, "gpu-0", json!({"gpu": "yes"}), json!([])).await?;
    for i in 1..150 {
        if carries(&born, TAINT) {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        born = create_node(&cluster, &format!("gpu-{i}"), json!({"gpu": "yes"}), json!([])).await?;
    }
    assert!(carries(&born, TAINT), "{:?}", keys(&born));
    let plain = create_node(&cluster, "plain", json!({}), json!([])).await?;
    assert!(!carries(&plain, TAINT));
    let one = |r: &NodeStartupRule| r.status.as_ref().is_some_and(|s| s.held == 1);
    let gpu = cluster.wait_for(&rules, "gpu", "one node held", SOON, one).await?;
    // Where it held every node, the operator could not start to release them.
    let (status, why) = condition(&gpu, "OperatorTolerates").unwrap_or_default();
    assert!(status == "False" && why.contains(TAINT), "{status} {why}");
    let told = json!({"taint": {"key": "example.com/told"}, "dryRun": true, "evidence": {"allDaemonSets": true}});
    rules.create(&PostParams::default(), &rule("told", told)).await?;
    let judged = |r: &NodeStartupRule| condition(r, "OperatorTolerates") == Some(("True", ""));
    cluster.wait_for(&rules, "told", "tolerated", SOON, judged).await?;

    let name = born.name_any();
    make_ready(&cluster, &init_pod(&cluster, &driver, &name).await?).await?;
    let condition = Patch::Strategic(json!({"status": {"conditions": [{"type": "GPUReady", "status": "True"}]}}));
    assert!(carries(&nodes(&cluster).get(&name).await?, TAINT), "half of the evidence is not enough");
    nodes(&cluster).patch_status(&name, &PatchParams::default(), &condition).await?;
    cluster.wait_for(&nodes(&cluster), &name, "released", SOON, |n| !carries(n, TAINT)).await?;

    let change = Patch::Merge(json!({"spec": {"taint": {"key": "example.com/other"}}}));
    let refused = rules.patch("gpu", &PatchParams::default(), &change).await;
    assert!(matches!(refused, Err(kube::Error::Api(status)) if status.code == 422), "a taint cannot be changed");

    // Deleted while nobody is there, with more to let go than one look can: the rule must outlast them all.
    groundcrew.terminate().await?;
    for i in 0..30 {
        let orphan = create_node(&cluster, &format!("orphan-{i}"), json!({"gpu": "yes"}), json!([])).await?;
        assert!(carries(&orphan, TAINT));
    }
    rules.delete("gpu", &DeleteParams::default()).await?;
    let _groundcrew = Groundcrew::builder(&cluster).name("again").config_yaml(&yaml).start().await?;
    cluster.wait_gone(&rules, "gpu", SOON).await?;
    let left = nodes(&cluster).list(&ListParams::default()).await?;
    let left: Vec<String> = left.iter().filter(|node| carries(node, TAINT)).map(ResourceExt::name_any).collect();
    assert!(left.is_empty(), "the rule is gone and its taint is not: {left:?}");
    births_are_free(&cluster, json!({"gpu": "yes"})).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_is_dry_or_cannot_be_followed_taints_nobody_and_says_so() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let rules = install(&cluster).await?;
    let groundcrew = Groundcrew::builder(&cluster).config_yaml(&config("")).start().await?;
    engine(&groundcrew, "policy").await?;
    for (name, evidence) in [
        ("broken", json!({"expression": "nodes.name == 'x'"})),
        ("dry", json!({"daemonSets": [{"namespace": "kube-system", "name": "missing"}]})),
    ] {
        rules
            .create(&PostParams::default(), &rule(name, json!({"evidence": evidence, "dryRun": name == "dry"})))
            .await?;
    }
    let nobody = json!({"matchLabels": {"no": "one"}});
    let thief = json!({"taint": {"key": KEY}, "nodeSelector": nobody, "evidence": {"allDaemonSets": true}});
    rules.create(&PostParams::default(), &rule("thief", thief)).await?;
    let namesake = json!({"evidence": {"allDaemonSets": true}});
    rules.create(&PostParams::default(), &rule("initializing", namesake)).await?;
    let refused = |r: &NodeStartupRule| accepted(r).is_some_and(|(status, _)| status == "False");
    let broken = cluster.wait_for(&rules, "broken", "refused", SOON, refused).await?;
    assert!(accepted(&broken).is_some_and(|(_, why)| why.contains("nodes")), "{:?}", accepted(&broken));
    let thief = cluster.wait_for(&rules, "thief", "refused", SOON, refused).await?;
    assert!(accepted(&thief).is_some_and(|(_, why)| why.contains("belongs to another rule")));
    let namesake = cluster.wait_for(&rules, "initializing", "refused", SOON, refused).await?;
    assert!(accepted(&namesake).is_some_and(|(_, why)| why.contains("built-in phase")));
    let node = create_node(&cluster, "n", json!({}), json!([])).await?;
    let startup: Vec<&str> = keys(&node).into_iter().filter(|k| k.contains("startup-taint")).collect();
    assert!(startup.is_empty(), "{startup:?}");
    let counts = |r: &NodeStartupRule| r.status.as_ref().is_some_and(|s| s.would_hold >= 1 && s.held == 0);
    cluster.wait_for(&rules, "dry", "counts whom it would hold", SOON, counts).await?;
    rules.delete("thief", &DeleteParams::default()).await?;
    cluster.wait_gone(&rules, "thief", SOON).await?;
    assert!(held(&nodes(&cluster).get("n").await?), "whom a refused rule means, and its end, are nothing to others");

    let evidence = json!({"daemonSets": [{"namespace": "kube-system", "name": "missing"}]});
    let unusable = json!({"nodeSelector": {"matchLabels": {"pool": "no label"}}, "evidence": evidence});
    rules.create(&PostParams::default(), &rule("unusable", unusable)).await?;
    let unusable = cluster.wait_for(&rules, "unusable", "refused by the API server", SOON, refused).await?;
    assert!(accepted(&unusable).is_some_and(|(_, why)| why.contains("no label")), "{:?}", accepted(&unusable));
    let usable = json!({"taint": {"key": "example.com/usable"}, "evidence": evidence});
    rules.create(&PostParams::default(), &rule("usable", usable)).await?;
    births_carry(&cluster, "example.com/usable").await?;
    let empty = rules.create(&PostParams::default(), &rule("empty", json!({"evidence": {}}))).await;
    assert!(matches!(empty, Err(kube::Error::Api(status)) if status.code == 422));
    Ok(())
}
