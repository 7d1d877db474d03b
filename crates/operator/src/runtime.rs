//! What every controller stands on: clients, the leader lease, caches of projections, the reconcile queue, the one
//! writer and Kubernetes events.
//!
//! ```text
//!   watch ──► cache ──keys──► queue ──► reconcile ──► writer ──► API server
//!                               ▲                        ▲
//!                               └─── lease: leader? ─────┘
//! ```

// NOTE FOR THE HELPER ON runtime/: the founder wrote apply.rs, events.rs, cache.rs and queue.rs (they exist, and are
// wired into run.rs). Do not rewrite them; improve them in place where you find a flaw. Yours: lease and its tests, then
// cache/tests.rs, then crates/testbed/tests/{writes,leadership}.rs.
pub mod apply;
pub mod cache;
pub mod client;
pub mod events;
pub mod leadership;
pub mod lease;
pub mod queue;
