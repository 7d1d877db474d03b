//! `node_startup` on a real API server: judged by what it stored and by its audit log.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::needless_pass_by_value,
    reason = "helpers of tests are tests to us, but not to clippy"
)]

mod births;
mod endings;
mod faults;
mod guard;
mod judge;
mod real_node;
mod releases;
mod rules;
mod scale;
mod support;
mod writers;
