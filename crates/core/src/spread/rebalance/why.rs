//! The reasons of a verdict, as data and as sentences.

use std::fmt;

use serde::Serialize;

use crate::spread::Class;

/// Why nothing is moved, or why something is remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Why {
    /// No replicas, or being deleted.
    Nothing,
    Balanced,
    Unstable(Unstable),
    Cooldown,
    Window,
    /// Every pod that would help is exempt.
    Exempt,
    NoNode(Class),
    Budget(Budgets),
    /// Other workloads come first.
    Turn,
    /// Moves did not improve the split.
    NoProgress,
    /// Pods wait for spot in vain.
    Dry,
    /// On on-demand until spot may be back.
    Drought,
    /// One pod is tried on spot.
    Return,
    DroughtOver,
}

/// What is not at rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Unstable {
    Paused,
    Unobserved,
    Rollout,
    Unavailable,
    Pods,
    Unready,
}

/// What the disruption budgets of a pod say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Budgets {
    #[default]
    Allow,
    Deny(String),
    /// The eviction API refuses a pod with more than one.
    Several(Vec<String>),
}

impl Why {
    /// A constant word, for metrics and logs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Why::Nothing => "nothing",
            Why::Balanced => "balanced",
            Why::Unstable(_) => "unstable",
            Why::Cooldown => "cooldown",
            Why::Window => "outside_window",
            Why::Exempt => "exempt",
            Why::NoNode(_) => "no_node",
            Why::Budget(_) => "blocked_by_pdb",
            Why::Turn => "waiting_for_turn",
            Why::NoProgress => "no_progress",
            Why::Dry => "spot_dry",
            Why::Drought => "drought",
            Why::Return => "returning",
            Why::DroughtOver => "drought_over",
        }
    }

    /// Whether somebody should hear that the split stays wrong.
    #[must_use]
    pub const fn is_blocked(&self) -> bool {
        matches!(self, Why::Exempt | Why::NoNode(_) | Why::Budget(_) | Why::NoProgress)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Nothing => f.write_str("there is nothing to split"),
            Why::Balanced => f.write_str("the split is as asked"),
            Why::Unstable(what) => write!(f, "the workload is not at rest: {what}"),
            Why::Cooldown => f.write_str("the last move is too recent"),
            Why::Window => f.write_str("the disruption window is closed"),
            Why::Exempt => f.write_str("every pod that could move is exempt from disruption"),
            Why::NoNode(class) => write!(f, "no schedulable {class} node would take the pod"),
            Why::Budget(budgets) => write!(f, "{budgets}"),
            Why::Turn => f.write_str("other workloads are moved first"),
            Why::NoProgress => f.write_str(
                "two moves did not improve the split, so moving stops until the workload changes: \
                 was the webhook reachable, and do nodes carry the right labels?",
            ),
            Why::Dry => f.write_str("no spot capacity for longer than fallbackAfter: replacements go to on-demand"),
            Why::Drought => f.write_str("spot ran dry: the workload waits on on-demand before it returns"),
            Why::Return => f.write_str("one pod is tried on spot again"),
            Why::DroughtOver => f.write_str("spot capacity is back"),
        }
    }
}

impl fmt::Display for Unstable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unstable::Paused => "it is paused",
            Unstable::Unobserved => "its newest generation is not observed yet",
            Unstable::Rollout => "a rollout or scaling is under way",
            Unstable::Unavailable => "a replica is not available",
            Unstable::Pods => "pods are coming or going",
            Unstable::Unready => "a pod is not ready",
        })
    }
}

impl fmt::Display for Budgets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Budgets::Allow => f.write_str("the disruption budgets allow it"),
            Budgets::Deny(name) => write!(f, "PodDisruptionBudget {name:?} allows no disruption now"),
            Budgets::Several(names) => {
                write!(f, "more than one PodDisruptionBudget selects the pod ({})", names.join(", "))
            }
        }
    }
}
