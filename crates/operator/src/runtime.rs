//! What every controller stands on: clients, the leader lease, caches of projections, the reconcile queue, the one
//! writer and Kubernetes events.
//!
//! ```text
//!   watch ──► cache ──keys──► queue ──► reconcile ──► writer ──► API server
//!                               ▲                        ▲
//!                               └─── lease: leader? ─────┘
//! ```

pub mod apply;
pub mod cache;
pub mod client;
pub mod events;
pub mod leadership;
pub mod lease;
pub mod queue;
