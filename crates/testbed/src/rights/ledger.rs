//! What groundcrew's parts did over all tests, against what they may do: a right nobody uses and a use without a right
//! are both wrong.
//!
//! Every cluster writes what its audit log shows when it ends; `testbed rights` compares once all tests are through.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::Context;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Part, USER, binds, role_of};
use crate::audit::AuditEvent;
use crate::{locate, objects, ports};

/// Where clusters leave what was used; nothing is kept without it.
const VARIABLE: &str = "GROUNDCREW_RIGHTS_DIR";

/// All features, each with everything that asks for a right of its own.
const EVERYTHING: &str = "nodeStartup: {enabled: true, denyUntolerated: true}\n";

/// Where a cluster keeps what its users may do.
const NOTES: &str = "rights";

/// The program in whose name rights are used, as it calls itself.
const AGENT: &str = "groundcrew/";

/// One thing a part did.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Use {
    account: String,
    verb: String,
    group: String,
    /// With its subresource, as rules spell it.
    resource: String,
    namespace: String,
    /// Empty where the request names no object.
    name: String,
    forbidden: bool,
}

/// Writes down what a user of this cluster may do.
pub(crate) fn note(cluster: &Path, user: &str, manifests: &str) -> anyhow::Result<()> {
    let directory = cluster.join(NOTES);
    fs::create_dir_all(&directory)?;
    Ok(fs::write(directory.join(user), manifests)?)
}

/// Whether the user has this right, as far as anybody noted.
fn has(cluster: &Path, user: &str, one: &Use) -> bool {
    let noted = fs::read_to_string(cluster.join(NOTES).join(user)).ok();
    let rights = noted.and_then(|text| rights_of(&objects::documents(&text).ok()?).ok());
    rights.is_some_and(|rights| rights.iter().any(|right| right.covers(one)))
}

/// Keeps what the audit log shows of groundcrew's parts.
pub(crate) fn keep(cluster: &Path, audit_log: &Path) -> anyhow::Result<()> {
    let Some(directory) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from) else {
        return Ok(());
    };
    let mut done = BTreeSet::new();
    let mut refused = BTreeSet::new();
    for line in BufReader::new(fs::File::open(audit_log)?).split(b'\n') {
        let line = line?;
        // The server may be in the midst of the last one, even of a character of it.
        let line = String::from_utf8_lossy(&line);
        // Most lines are other people's; parsing them all would take longer than some tests.
        if !line.contains(AGENT) {
            continue;
        }
        let Ok(event) = serde_json::from_str::<AuditEvent>(&line) else { continue };
        for one in uses(&event) {
            let by_whom = (event.user.username.clone(), one);
            if is_forbidden(&event) {
                refused.insert(by_whom)
            } else {
                done.insert(by_whom)
            };
        }
    }
    // An API server that has just started refuses everything until it has read the roles.
    let refused = refused.difference(&done).filter(|(user, one)| !has(cluster, user, one));
    let refused = refused.map(|(_, one)| Use { forbidden: true, ..one.clone() });
    let used: BTreeSet<Use> = refused.chain(done.iter().map(|(_, one)| one.clone())).collect();
    fs::create_dir_all(&directory)?;
    let file = directory.join(format!("{:016x}.json", ports::random()));
    Ok(fs::write(file, serde_json::to_vec_pretty(&used)?)?)
}

/// A refusal by admission, such as in a namespace that ends, is not a missing right.
fn is_forbidden(event: &AuditEvent) -> bool {
    event.annotations.get("authorization.k8s.io/decision").is_some_and(|decision| decision == "forbid")
}

/// What one request asked of the rights.
fn uses(event: &AuditEvent) -> Vec<Use> {
    let (Some(account), Some(about)) = (account(&event.user.username), event.object_ref.clone()) else {
        return Vec::new();
    };
    // Whoever else has the credentials, such as a test that plays a thief, has another program.
    if !event.user_agent.starts_with(AGENT) {
        return Vec::new();
    }
    let resource =
        if about.subresource.is_empty() { about.resource } else { format!("{}/{}", about.resource, about.subresource) };
    // Single objects are named in rules only if they are our own; names of all others are many and tell nothing.
    let ours = about.name.starts_with(USER) || resource == "customresourcedefinitions";
    let name = if ours { about.name } else { String::new() };
    let (group, namespace) = (about.api_group, about.namespace);
    let one = Use { account, verb: event.verb.clone(), group, resource, namespace, name, forbidden: false };
    // Some verbs stand for another that is needed as well but never logged.
    let implied = match event.verb.as_str() {
        // Apply of an object that was not there.
        "patch" if event.code() == 201 => Some("create"),
        // Lists are streamed; a server that cannot do that is asked for a plain one.
        "watch" => Some("list"),
        // Whether an event is told again, as a series, is a matter of time.
        "create" if one.resource == "events" => Some("patch"),
        _ => None,
    };
    let implied = implied.map(|verb| Use { verb: verb.to_owned(), ..one.clone() });
    implied.into_iter().chain([one]).collect()
}

/// The account behind a user: one of a test's process, or the one of an installation.
fn account(user: &str) -> Option<String> {
    let installed = user.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    let tested = user.strip_prefix(USER).and_then(|rest| rest.strip_prefix(':')).and_then(|rest| rest.split_once(':'));
    let name = installed.map(|(_, name)| name).or(tested.map(|(name, _)| name))?;
    Part::ALL.iter().any(|part| part.account() == name).then(|| name.to_owned())
}

/// One right: a rule taken apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    account: &'static str,
    namespace: Option<String>,
    verb: String,
    group: String,
    resource: String,
    names: Vec<String>,
}

impl Right {
    fn covers(&self, used: &Use) -> bool {
        self.account == used.account
            && self.verb == used.verb
            && self.group == used.group
            && self.resource == used.resource
            && self.namespace.as_ref().is_none_or(|namespace| *namespace == used.namespace)
            && (self.names.is_empty() || self.names.contains(&used.name))
    }
}

impl std::fmt::Display for Right {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { account, verb, group, resource, .. } = self;
        let place = self.namespace.as_deref().unwrap_or("the cluster");
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{account}: {verb} {resource}{dot}{group} {:?} in {place}", self.names)
    }
}

/// Compares what all tests used with what an installation grants.
///
/// # Errors
/// A right was never used, or something was tried without a right; or nothing was recorded.
pub fn compare(directory: &Path) -> anyhow::Result<String> {
    let mut used: BTreeSet<Use> = BTreeSet::new();
    for file in fs::read_dir(directory).with_context(|| format!("nothing recorded in {}", directory.display()))? {
        used.extend(serde_json::from_slice::<BTreeSet<Use>>(&fs::read(file?.path())?)?);
    }
    let granted = granted()?;
    let idle = granted.iter().filter(|right| !used.iter().any(|one| !one.forbidden && right.covers(one)));
    let idle = idle.map(|right| format!("never used: {right}"));
    let missing = used.iter().filter(|one| one.forbidden).map(|one| format!("not allowed: {one:?}"));
    let problems: Vec<String> = idle.chain(missing).collect();
    anyhow::ensure!(problems.is_empty(), "rights and their use differ:\n{}", problems.join("\n"));
    Ok(format!("{} rights, each of them used; nothing was tried without one", granted.len()))
}

/// The rights of an installation with every feature on.
fn granted() -> anyhow::Result<BTreeSet<Right>> {
    let config = tempfile::NamedTempFile::new()?;
    fs::write(config.path(), EVERYTHING)?;
    let mut rights = BTreeSet::new();
    for what in [["manifests"].as_slice(), ["manifests", "--cleanup"].as_slice()] {
        let mut command = std::process::Command::new(locate::groundcrew()?);
        let output = command.args(what).arg("--config").arg(config.path()).output()?;
        anyhow::ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        rights.extend(rights_of(&objects::documents(&String::from_utf8(output.stdout)?)?)?);
    }
    Ok(rights)
}

fn rights_of(all: &[Value]) -> anyhow::Result<BTreeSet<Right>> {
    let kind = |object: &Value| object.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
    let name = |object: &Value| object.pointer("/metadata/name").and_then(Value::as_str).map(str::to_owned);
    let mut rights = BTreeSet::new();
    for binding in all.iter().filter(|object| kind(object).ends_with("Binding") && object.get("roleRef").is_some()) {
        let role = role_of(binding)?;
        let bound = all.iter().find(|object| {
            format!("{}Binding", kind(object)) == kind(binding) && name(object).as_deref() == Some(role.as_str())
        });
        let rules = bound.and_then(|role| role.get("rules")).cloned().context("a binding without its role")?;
        let namespace = binding.pointer("/metadata/namespace").and_then(Value::as_str).map(str::to_owned);
        for part in Part::ALL.into_iter().filter(|part| binds(binding, *part)) {
            for rule in serde_json::from_value::<Vec<PolicyRule>>(rules.clone())? {
                rights.extend(take_apart(&rule, part, namespace.as_deref()));
            }
        }
    }
    Ok(rights)
}

fn take_apart(rule: &PolicyRule, part: Part, namespace: Option<&str>) -> Vec<Right> {
    let list = |of: &Option<Vec<String>>| of.clone().unwrap_or_default();
    let mut all = Vec::new();
    for group in list(&rule.api_groups) {
        for resource in list(&rule.resources) {
            for verb in &rule.verbs {
                all.push(Right {
                    account: part.account(),
                    namespace: namespace.map(str::to_owned),
                    verb: verb.clone(),
                    group: group.clone(),
                    resource: resource.clone(),
                    names: list(&rule.resource_names),
                });
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn used(verb: &str, name: &str, namespace: &str) -> Use {
        Use {
            account: "groundcrew".into(),
            verb: verb.into(),
            group: String::new(),
            resource: "secrets".into(),
            namespace: namespace.into(),
            name: name.into(),
            forbidden: false,
        }
    }

    #[test]
    fn a_right_is_used_only_by_its_verb_on_its_object_in_its_namespace() {
        let role = json!({"kind": "Role", "metadata": {"name": "r", "namespace": "home"},
            "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["tls"]}]});
        let binding = json!({"kind": "RoleBinding", "metadata": {"name": "b", "namespace": "home"},
            "roleRef": {"name": "r"}, "subjects": [{"name": "groundcrew"}]});
        let rights = rights_of(&[role, binding]).unwrap();
        let right = rights.first().unwrap();
        assert!(right.covers(&used("get", "tls", "home")));
        for other in [used("list", "tls", "home"), used("get", "other", "home"), used("get", "tls", "elsewhere")] {
            assert!(!right.covers(&other), "{other:?}");
        }
    }

    #[test]
    fn what_the_audit_log_does_not_spell_out_counts_too_and_a_thief_does_not() {
        let event = |verb: &str, code: u16, agent: &str| -> AuditEvent {
            serde_json::from_value(json!({
                "verb": verb, "requestURI": "/", "userAgent": agent,
                "user": {"username": "system:serviceaccount:groundcrew-system:groundcrew"},
                "objectRef": {"resource": "nodes"}, "responseStatus": {"code": code},
                "requestReceivedTimestamp": "2026-01-01T00:00:00Z", "stageTimestamp": "2026-01-01T00:00:00Z",
            }))
            .unwrap()
        };
        let verbs = |event: &AuditEvent| uses(event).into_iter().map(|one| one.verb).collect::<Vec<_>>();
        assert_eq!(verbs(&event("patch", 201, "groundcrew/1")), ["create", "patch"]);
        assert_eq!(verbs(&event("patch", 200, "groundcrew/1")), ["patch"]);
        assert_eq!(verbs(&event("watch", 200, "groundcrew/1")), ["list", "watch"]);
        assert!(verbs(&event("get", 200, "curl/8")).is_empty());
    }

    #[test]
    fn users_of_tests_and_accounts_of_installations_are_told_from_others() {
        assert_eq!(account("groundcrew:groundcrew-agent:0a1b2c3d").as_deref(), Some("groundcrew-agent"));
        assert_eq!(account("system:serviceaccount:groundcrew-system:groundcrew").as_deref(), Some("groundcrew"));
        assert_eq!(account("system:serviceaccount:kube-system:generic-garbage-collector"), None);
        assert_eq!(account("testbed-admin"), None);
    }
}
