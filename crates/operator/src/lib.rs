//! Everything of groundcrew that touches the world.
//!
//! ```text
//! cli ─► run ─┬─ admission   reviews in, one checked patch out
//!             ├─ runtime     caches, lease, the one writer
//!             ├─ <feature>   gather → decide → apply, one file each
//!             └─ health      probes and metrics
//! ```

pub mod admission;
pub mod agent;
pub mod cleanup;
pub mod cli;
pub mod definitions;
pub mod features;
pub mod health;
pub mod manifests;
pub mod node_startup;
pub mod run;
pub mod runtime;
pub mod sizing;
pub mod spread;
pub mod telemetry;
pub mod timestamp;
pub mod warmup;
