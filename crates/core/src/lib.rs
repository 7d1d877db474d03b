//! groundcrew's decisions: facts and a clock reading in, a verdict with its reason out.
//!
//! Nothing here can reach a cluster or a clock: what a crate may depend on is what it may do.

pub mod certificates;
pub mod config;
pub mod cron;
pub mod duration;
pub mod feature;
pub mod keys;
pub mod names;
pub mod node_startup;
pub mod patch;
pub mod pod;
pub mod quantity;
pub mod selector;
pub mod sizing;
pub mod spread;
pub mod timestamp;
pub mod warmup;
