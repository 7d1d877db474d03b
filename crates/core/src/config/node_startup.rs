//! The section `nodeStartup`.

use std::time::Duration;

use serde_json::Value;

use super::names::{label, qualified_name};
use super::reader::{Parsed, Section, boolean, duration_from, integer, one_of, text, texts};
use crate::keys;
use crate::node_startup::rule::{Common, Phase, initializing, preinit};
use crate::node_startup::{OnTimeout, ReadyBy, Rule, Rules, Timeout, guard};

#[derive(Clone, Debug)]
pub struct NodeStartupFeature {
    /// Off unless asked for: it is the one feature that acts on objects which have not asked themselves.
    pub enabled: bool,
    pub engine: Engine,
    /// Whether the built-in rule applies; rules of the cluster's own do in any case.
    pub built_in: bool,
    pub phases: Vec<Phase>,
    pub common: Common,
    pub backfill: bool,
    pub deny_untolerated: bool,
    /// Taint keys of the cluster's own rules that the operator's pods tolerate beside the built-in ones.
    pub operator_tolerates: Vec<String>,
    pub failure_policy: FailurePolicy,
    pub guard: guard::Limits,
}

/// Who taints new nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// Policies where the API server serves them, else the webhook.
    Auto,
    Webhook,
    Policy,
    /// Nobody here; nodes come with the taint by other means, such as the kubelet's own flag.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailurePolicy {
    Fail,
    Ignore,
}

impl Engine {
    pub const ALL: &'static [Self] = &[Self::Auto, Self::Webhook, Self::Policy, Self::None];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Webhook => "webhook",
            Self::Policy => "policy",
            Self::None => "none",
        }
    }
}

impl FailurePolicy {
    pub const ALL: &'static [Self] = &[Self::Fail, Self::Ignore];

    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Fail => "Fail",
            Self::Ignore => "Ignore",
        }
    }
}

impl NodeStartupFeature {
    /// Keys of taints on which the operator's own pods start.
    pub fn tolerated_keys(&self) -> impl Iterator<Item = &str> {
        self.phases
            .iter()
            .map(|phase| phase.taint_key.as_str())
            .chain(self.operator_tolerates.iter().map(String::as_str))
    }

    /// The rules that need no cluster to be known.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            rules: if self.built_in { Rule::built_in(&self.phases, &self.common) } else { Vec::new() },
            skip: vec![(keys::AKS_MODE.to_owned(), keys::AKS_MODE_SYSTEM.to_owned())],
            backfill: self.backfill,
            guard: self.guard,
            ..Rules::default()
        }
    }
}

pub(super) fn node_startup(mut s: Section<'_>) -> NodeStartupFeature {
    let webhook = s.get("webhook", true, boolean);
    let engine = match s.get("engine", Engine::Auto, one_of(Engine::ALL, Engine::name)) {
        // The seed knew no policies: turning its webhook off meant that nobody taints.
        Engine::Auto | Engine::Webhook if !webhook => Engine::None,
        engine => engine,
    };
    let taint_key = s.get("taintKey", keys::STARTUP_INITIALIZING.to_owned(), qualified_name);
    let phases = s.get("phases", vec![initializing(&taint_key)], phases(&taint_key));
    let after = s.get("timeout", Duration::ZERO, duration_from(Duration::ZERO));
    let then = s.get("onTimeout", OnTimeout::default(), one_of(OnTimeout::ALL, OnTimeout::name));
    let min_hold = s.get("minHold", Duration::ZERO, duration_from(Duration::ZERO));
    let timeout = (!after.is_zero()).then_some(Timeout { after, then });
    if timeout.is_some() && min_hold > after {
        s.reject("minHold", "must not be longer than timeout", "a node would be late before it may be ready");
    }
    NodeStartupFeature {
        enabled: s.get("enabled", false, boolean),
        engine,
        built_in: s.get("builtIn", true, boolean),
        phases,
        common: Common {
            ready_by: s.get("readyBy", ReadyBy::default(), one_of(ReadyBy::ALL, ReadyBy::name)),
            min_hold,
            timeout,
            init_namespaces: s.get("initNamespaces", Vec::new(), texts),
        },
        backfill: s.get("backfill", false, boolean),
        deny_untolerated: s.get("denyUntolerated", false, boolean),
        operator_tolerates: s.get("operatorTolerates", Vec::new(), taint_keys),
        failure_policy: s.get("failurePolicy", FailurePolicy::Fail, one_of(FailurePolicy::ALL, FailurePolicy::name)),
        guard: limits(s.section("guard")),
    }
}

fn limits(mut s: Section<'_>) -> guard::Limits {
    let default = guard::Limits::default();
    let share = s.get("share", u64::from(default.share), integer(1, 100));
    let at_least = s.get("minNodes", default.at_least as u64, integer(1, 1000));
    guard::Limits {
        share: u8::try_from(share).unwrap_or(default.share),
        window: s.get("window", default.window, duration_from(Duration::from_secs(60))),
        at_least: usize::try_from(at_least).unwrap_or(default.at_least),
    }
}

/// Names of known phases, or phases spelled out: `{name, taintKey, initLabel}`.
fn phases(taint_key: &str) -> impl Fn(&Value) -> Parsed<Vec<Phase>> {
    move |value| {
        let phases = match value {
            Value::Array(items) => items.iter().map(|item| phase(taint_key, item)).collect::<Parsed<Vec<_>>>()?,
            _ => texts(value)?.into_iter().map(|name| phase(taint_key, &Value::String(name))).collect::<Parsed<_>>()?,
        };
        let twice = phases.iter().enumerate().find(|(at, phase)| {
            phases.iter().take(*at).any(|other| other.taint_key == phase.taint_key || other.name == phase.name)
        });
        match twice {
            _ if phases.is_empty() => {
                Err(("expected at least one phase".to_owned(), "write [initializing]".to_owned()))
            }
            Some((_, Phase { name, .. })) => {
                Err((format!("phase {name:?} has the name or the taintKey of an earlier one"), String::new()))
            }
            None => Ok(phases),
        }
    }
}

fn phase(taint_key: &str, value: &Value) -> Parsed<Phase> {
    let hint = || "write preinit, initializing, or {name, taintKey, initLabel}".to_owned();
    match value {
        Value::String(name) if name == "preinit" => Ok(preinit()),
        Value::String(name) if name == "initializing" => Ok(initializing(taint_key)),
        Value::Object(map) => {
            let known = ["name", "taintKey", "initLabel"];
            if let Some(key) = map.keys().find(|key| !known.contains(&key.as_str())) {
                return Err((format!("unknown key {key:?} in a phase"), hint()));
            }
            let part = |key: &str| map.get(key).ok_or_else(|| (format!("a phase lacks {key}"), hint()));
            let name = part("name").and_then(text)?;
            if !is_name(&name) {
                return Err((format!("phase name {name:?} is not made of a-z, 0-9 and -"), String::new()));
            }
            let taint_key = part("taintKey").and_then(qualified_name)?;
            Ok(Phase { name, taint_key, init_label: part("initLabel").and_then(label)? })
        }
        other => Err((format!("unknown phase {other}"), hint())),
    }
}

/// A phase's name becomes part of an object's.
fn is_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=40).contains(&text.len()) && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

fn taint_keys(value: &Value) -> Parsed<Vec<String>> {
    texts(value)?.into_iter().map(|key| qualified_name(&Value::String(key))).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::needless_pass_by_value, reason = "literals read better by value")]

    use rstest::rstest;
    use serde_json::json;

    use super::*;
    use crate::config::{Config, Override, Problems, load};

    fn section(section: Value, env: &[(&str, &str)]) -> Result<NodeStartupFeature, Problems> {
        let overrides = env.iter().filter_map(|(name, text)| Override::from_env(name, text)).collect();
        load(json!({"nodeStartup": section}), overrides).map(|Config { node_startup, .. }| node_startup)
    }

    #[test]
    fn nothing_given_means_the_documented_defaults() {
        let it = section(json!({}), &[]).unwrap();
        assert!(!it.enabled && !it.backfill && !it.deny_untolerated && it.built_in);
        assert_eq!((it.engine, it.failure_policy), (Engine::Auto, FailurePolicy::Fail));
        assert_eq!(it.common, Common::default());
        assert_eq!(it.phases, [initializing("startup.k8s.io/initializing")]);
        assert_eq!(it.rules().rules.len(), 1);
    }

    #[rstest]
    #[case::exactly_one(json!({}), &[("STARTUP_BACKFILL", "1")], true)]
    #[case::true_is_not_one(json!({}), &[("STARTUP_BACKFILL", "true")], false)]
    #[case::the_variable_wins(json!({"backfill": true}), &[("STARTUP_BACKFILL", "0")], false)]
    #[case::empty_is_unset(json!({"backfill": true}), &[("STARTUP_BACKFILL", "")], true)]
    #[case::our_own_variable(json!({}), &[("GROUNDCREW_NODE_STARTUP__BACKFILL", "true")], true)]
    fn backfill_follows_the_seeds_variable(#[case] file: Value, #[case] env: &[(&str, &str)], #[case] expected: bool) {
        assert_eq!(section(file, env).unwrap().backfill, expected);
    }

    #[rstest]
    #[case::off(json!({}), "0", Engine::None)]
    #[case::on(json!({}), "1", Engine::Auto)]
    #[case::a_policy_is_no_webhook(json!({"engine": "policy"}), "0", Engine::Policy)]
    #[case::asked_for_and_turned_off(json!({"engine": "webhook"}), "0", Engine::None)]
    fn the_seeds_webhook_switch_turns_tainting_off(#[case] file: Value, #[case] text: &str, #[case] expected: Engine) {
        assert_eq!(section(file, &[("STARTUP_WEBHOOK", text)]).unwrap().engine, expected);
    }

    #[test]
    fn a_timeout_of_zero_is_none() {
        assert_eq!(section(json!({"timeout": "0s", "onTimeout": "release"}), &[]).unwrap().common.timeout, None);
        let timeout = section(json!({"timeout": "10m", "onTimeout": "release"}), &[]).unwrap().common.timeout;
        assert_eq!(timeout, Some(Timeout { after: Duration::from_secs(600), then: OnTimeout::Release }));
    }

    #[test]
    fn phases_are_named_or_spelled_out() {
        let it = section(json!({"phases": ["preinit", "initializing"], "taintKey": "example.com/hold"}), &[]).unwrap();
        let keys: Vec<&str> = it.phases.iter().map(|p| p.taint_key.as_str()).collect();
        assert_eq!(keys, ["startup.k8s.io/preinit", "example.com/hold"]);
        let own = json!({"phases": [{"name": "disk", "taintKey": "a.b/disk", "initLabel": "role=disk"}]});
        let own = section(own, &[]).unwrap().phases;
        assert_eq!(own[0].init_label, ("role".to_owned(), "disk".to_owned()));
        let by_env = section(json!({}), &[("GROUNDCREW_NODESTARTUP__PHASES", "preinit,initializing")]).unwrap();
        assert_eq!(by_env.phases.len(), 2);
    }

    #[rstest]
    #[case(json!({"phases": []}), "phases")]
    #[case(json!({"phases": ["warming"]}), "phases")]
    #[case(json!({"phases": ["initializing", "initializing"]}), "phases")]
    #[case(json!({"phases": [{"name": "a", "taintKey": "a.b/c"}]}), "phases")]
    #[case(json!({"phases": [{"name": "A b", "taintKey": "a.b/c", "initLabel": "r=d"}]}), "phases")]
    #[case(json!({"taintKey": "Not/Valid Key"}), "taintKey")]
    #[case(json!({"taintKey": "a/b/c"}), "taintKey")]
    #[case(json!({"taintKey": "a..b/c"}), "taintKey")]
    #[case(json!({"phases": [{"name": "a", "taintKey": "a.b/c", "initLabel": "r= d"}]}), "phases")]
    #[case(json!({"operatorTolerates": ["a b"]}), "operatorTolerates")]
    #[case(json!({"engine": "both"}), "engine")]
    #[case(json!({"failurePolicy": "fail"}), "failurePolicy")]
    #[case(json!({"minHold": "2m", "timeout": "1m"}), "minHold")]
    #[case(json!({"guard": {"share": 0}}), "guard.share")]
    #[case(json!({"readyBy": "all"}), "readyBy")]
    fn a_bad_value_is_named_by_its_path(#[case] file: Value, #[case] path: &str) {
        let problems = section(file, &[]).unwrap_err();
        let paths: Vec<&str> = problems.0.iter().map(|p| p.path.as_str()).collect();
        assert_eq!(paths, [format!("nodeStartup.{path}")]);
    }
}
