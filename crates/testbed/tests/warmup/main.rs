//! `warmup` on a real API server: judged by what loopback servers received and by what the API server stored.

mod faults;
mod lifecycle;
mod nodes;
mod policy;
mod support;
