//! A workload's replicas stay split between spot and on-demand nodes.
//!
//! ```text
//! annotations ─► Rule ─┬─ place(rule, own pods + reservations) ─► class and rank of a new pod      (admission)
//!                      └─ decide(rule, workload, own pods, memory, now) ─► Verdict                 (leader)
//! ```
//!
//! Everything rests on one order: the k-th pod of a revision has the class that takes the split of k−1 pods to the split
//! of k. Pods created one after the other follow it, StatefulSet ordinals are it, and removing from its end keeps every
//! prefix exact.

use std::fmt;

use serde::{Deserialize, Serialize};

mod amount;
pub mod memory;
pub mod node;
pub mod place;
pub mod rebalance;
pub mod rule;
pub mod split;

pub use memory::Memory;
pub use rebalance::{Verdict, Why, decide};
pub use rule::Rule;
pub use split::Split;

/// The two kinds of capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    Spot,
    OnDemand,
}

impl Class {
    pub const ALL: [Class; 2] = [Class::Spot, Class::OnDemand];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Class::Spot => "spot",
            Class::OnDemand => "on-demand",
        }
    }

    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Class::Spot => Class::OnDemand,
            Class::OnDemand => Class::Spot,
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What kind of workload is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    Deployment,
    StatefulSet,
}

impl Kind {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Deployment => "Deployment",
            Kind::StatefulSet => "StatefulSet",
        }
    }
}
