//! The features by name: one name in config, metrics, logs, docs and webhook entries.

use std::fmt;

/// A column through the whole program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    Spread,
    Timestamp,
}

impl Feature {
    pub const ALL: [Feature; 2] = [Feature::Spread, Feature::Timestamp];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Feature::Spread => "spread",
            Feature::Timestamp => "timestamp",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
