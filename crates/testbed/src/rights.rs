//! The operator under test has the rights that `groundcrew manifests` prints for its configuration, and no others.

pub mod ledger;

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use kube::discovery::ApiResource;
use kube::{Client, ResourceExt};
use ring::digest;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::{locate, objects};

/// Users of the testbed that stand for a part of groundcrew: `groundcrew:<part>:<which rights>`.
const USER: &str = "groundcrew";
const DEADLINE: Duration = Duration::from_secs(30);

/// A part of groundcrew with rights of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    Operator,
    Agent,
    Cleanup,
}

impl Part {
    const ALL: [Self; 3] = [Self::Operator, Self::Agent, Self::Cleanup];

    fn of_command(command: &str) -> Self {
        match command {
            "agent" => Self::Agent,
            "cleanup" | "open-gates" => Self::Cleanup,
            _ => Self::Operator,
        }
    }

    /// The service account an installation gives it.
    fn account(self) -> &'static str {
        match self {
            Self::Operator => "groundcrew",
            Self::Agent => "groundcrew-agent",
            Self::Cleanup => "groundcrew-cleanup",
        }
    }
}

/// How the program is started, as far as its rights depend on it.
#[derive(Debug)]
pub(crate) struct Start<'a> {
    pub(crate) command: &'a str,
    pub(crate) config: Option<&'a Path>,
    pub(crate) arguments: &'a [OsString],
    pub(crate) environment: &'a [(OsString, OsString)],
}

/// Grants what an installation with this configuration would, to a user of its own; the answer is its kubeconfig.
pub(crate) async fn grant(cluster: &Cluster, start: &Start<'_>) -> anyhow::Result<PathBuf> {
    let part = Part::of_command(start.command);
    let printed = manifests(start).await?;
    let fingerprint: String = {
        let digest = digest::digest(&digest::SHA256, printed.as_bytes());
        digest.as_ref().iter().take(4).map(|byte| format!("{byte:02x}")).collect()
    };
    let user = format!("{USER}:{}:{fingerprint}", part.account());
    let client = cluster.client();
    let all = objects::documents(&printed)?;
    // Not among the objects of a clean-up, whose namespace is there since the installation.
    for name in all.iter().filter_map(|object| object.pointer("/metadata/namespace")).collect::<HashSet<_>>() {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        create_missing(&client, namespace).await?;
    }
    for mut object in all.clone() {
        match object.get("kind").and_then(Value::as_str) {
            Some("Lease") => create_missing(&client, object).await?,
            Some("ClusterRole" | "Role") => {
                rename(&mut object, &fingerprint)?;
                apply(&client, object).await?;
            }
            Some("ClusterRoleBinding" | "RoleBinding") => {
                let (ours, role) = (binds(&object, part), role_of(&object)?);
                if ours {
                    rename(&mut object, &fingerprint)?;
                    set(&mut object, "/roleRef/name", json!(format!("{role}-{fingerprint}")))?;
                    let subject = json!([{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]);
                    set(&mut object, "/subjects", subject)?;
                    apply(&client, object).await?;
                }
            }
            Some("ValidatingAdmissionPolicy" | "ValidatingAdmissionPolicyBinding") if confines(&all, &object, part) => {
                rename(&mut object, &fingerprint)?;
                let name = object.pointer("/metadata/name").cloned().unwrap_or_default();
                let whom = json!(format!("request.userInfo.username == '{user}'"));
                match object.pointer("/spec/policyName") {
                    Some(_) => set(&mut object, "/spec/policyName", name)?,
                    None => set(&mut object, "/spec/matchConditions/0/expression", whom)?,
                }
                apply(&client, object).await?;
            }
            _ => {}
        }
    }
    for object in &all {
        in_force(&client, &user, part, &all, object).await?;
    }
    ledger::note(&cluster.info().dir, &user, &printed)?;
    cluster.kubeconfig_for(&user, &[])
}

/// What an installation consists of, as the program itself prints it.
async fn manifests(start: &Start<'_>) -> anyhow::Result<String> {
    let mut command = tokio::process::Command::new(locate::groundcrew()?);
    command.arg("manifests");
    if Part::of_command(start.command) == Part::Cleanup {
        command.arg("--cleanup");
    }
    if let Some(file) = start.config {
        command.arg("--config").arg(file);
    }
    command.args(start.arguments).envs(start.environment.iter().cloned()).env_remove("KUBECONFIG");
    let output = command.output().await?;
    anyhow::ensure!(output.status.success(), "groundcrew manifests: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn binds(binding: &Value, part: Part) -> bool {
    let subjects = binding.get("subjects").and_then(Value::as_array);
    subjects.into_iter().flatten().any(|subject| subject.get("name").and_then(Value::as_str) == Some(part.account()))
}

/// Whether a policy or its binding is about this part. Those of agents ask for the node in a real pod's token; a test
/// of their own has such tokens.
fn confines(all: &[Value], object: &Value, part: Part) -> bool {
    let name = object.pointer("/metadata/name");
    let of_that_name = all.iter().filter(|other| other.pointer("/metadata/name") == name);
    let account = format!(":{}'", part.account());
    part == Part::Operator
        && of_that_name
            .filter_map(|policy| policy.pointer("/spec/matchConditions/0/expression"))
            .any(|condition| condition.as_str().is_some_and(|condition| condition.ends_with(&account)))
}

fn role_of(binding: &Value) -> anyhow::Result<String> {
    let name = binding.pointer("/roleRef/name").and_then(Value::as_str);
    Ok(name.context("a binding without a role")?.to_owned())
}

/// Two configurations in one cluster must not share their roles.
fn rename(object: &mut Value, fingerprint: &str) -> anyhow::Result<()> {
    let name = object.pointer("/metadata/name").and_then(Value::as_str).context("no name")?.to_owned();
    set(object, "/metadata/name", json!(format!("{name}-{fingerprint}")))
}

fn set(object: &mut Value, pointer: &str, value: Value) -> anyhow::Result<()> {
    *object.pointer_mut(pointer).with_context(|| format!("no {pointer}"))? = value;
    Ok(())
}

fn api(client: &Client, object: &DynamicObject) -> anyhow::Result<Api<DynamicObject>> {
    let kind = GroupVersionKind::try_from(object.types.as_ref().context("no kind")?)?;
    let resource = ApiResource::from_gvk(&kind);
    Ok(match object.namespace() {
        Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    })
}

async fn apply(client: &Client, object: Value) -> anyhow::Result<()> {
    let object: DynamicObject = serde_json::from_value(object)?;
    let how = PatchParams::apply("testbed").force();
    api(client, &object)?.patch(&object.name_any(), &how, &Patch::Apply(&object)).await?;
    Ok(())
}

async fn create_missing(client: &Client, object: Value) -> anyhow::Result<()> {
    let object: DynamicObject = serde_json::from_value(object)?;
    match api(client, &object)?.create(&PostParams::default(), &object).await {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

/// The API server follows roles and bindings by watch: waits until a rule of this binding's role is honoured.
async fn in_force(client: &Client, user: &str, part: Part, all: &[Value], binding: &Value) -> anyhow::Result<()> {
    let kind = binding.get("kind").and_then(Value::as_str).unwrap_or_default();
    if !kind.ends_with("Binding") || !binds(binding, part) {
        return Ok(());
    }
    let (role, namespace) = (role_of(binding)?, binding.pointer("/metadata/namespace").and_then(Value::as_str));
    let bound = all.iter().find(|object| {
        object.get("kind").and_then(Value::as_str) == Some(kind.trim_end_matches("Binding"))
            && object.pointer("/metadata/name").and_then(Value::as_str) == Some(&role)
    });
    let rules = bound.and_then(|role| role.get("rules")).cloned().unwrap_or_default();
    let rules: Vec<PolicyRule> = serde_json::from_value(rules)?;
    let Some(asked) = rules.last().map(|rule| attributes(rule, namespace)) else { return Ok(()) };
    let spec = SubjectAccessReviewSpec {
        user: Some(user.to_owned()),
        resource_attributes: Some(asked),
        ..SubjectAccessReviewSpec::default()
    };
    let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
    let began = Instant::now();
    loop {
        let answer = Api::<SubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await?;
        if answer.status.is_some_and(|status| status.allowed) {
            return Ok(());
        }
        anyhow::ensure!(began.elapsed() < DEADLINE, "the rights of {user} never come into force: {review:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

fn attributes(rule: &PolicyRule, namespace: Option<&str>) -> ResourceAttributes {
    let first = |of: &Option<Vec<String>>| of.iter().flatten().next().cloned();
    let resource = first(&rule.resources).unwrap_or_default();
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, sub)) => (resource.to_owned(), Some(sub.to_owned())),
        None => (resource, None),
    };
    ResourceAttributes {
        group: first(&rule.api_groups),
        resource: Some(resource),
        subresource,
        name: first(&rule.resource_names),
        namespace: namespace.map(str::to_owned),
        verb: rule.verbs.first().cloned(),
        ..ResourceAttributes::default()
    }
}
