//! Requests to one pod: paced, measured, and bounded in time, memory and reach.
//!
//! ```text
//! rules, address ─► warm ─┬─► engine ─► client ─► pool ─► connect ─► the pod's socket address
//!                         │     │ one permit per request        │ http1, h2c, TLS without verification
//!                         │     └─► report: HDR histograms      └─ no DNS, no proxy, no redirect
//!                         └─► scenario, grpc: what to send
//! ```
//!
//! Guarantees: a connection goes to the address it was given and nowhere else; a response is read up to 1 MiB and for
//! no longer than its request may take; dropping a run closes its connections.

pub mod call;
pub mod client;
mod connect;
pub mod engine;
pub mod grpc;
pub mod pace;
pub mod report;
mod scenario;
pub mod warm;
