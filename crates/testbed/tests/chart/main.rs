//! The chart: what helm makes of it, and what becomes of that in a cluster.
#![expect(clippy::indexing_slicing, reason = "a test ends where its assumption fails")]
#![expect(clippy::print_stderr, reason = "what our pods said belongs to a failed test's output")]

mod alerts;
mod cert_manager;
mod cluster;
mod generated;
mod install;
mod render;
mod schema;
mod support;
mod upgrade;
