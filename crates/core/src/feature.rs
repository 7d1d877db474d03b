//! The features by name: one name in config, metrics, logs, docs and webhook entries.

use std::fmt;

/// A column through the whole program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    NodeStartup,
    Sizing,
    Spread,
    Timestamp,
    Warmup,
}

impl Feature {
    pub const ALL: [Feature; 5] =
        [Feature::NodeStartup, Feature::Sizing, Feature::Spread, Feature::Timestamp, Feature::Warmup];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Feature::NodeStartup => "node_startup",
            Feature::Sizing => "sizing",
            Feature::Spread => "spread",
            Feature::Timestamp => "timestamp",
            Feature::Warmup => "warmup",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
