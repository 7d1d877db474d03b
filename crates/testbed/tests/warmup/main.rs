//! `warmup` on a real API server: judged by what loopback servers received and by what the API server stored.
#![expect(clippy::indexing_slicing, clippy::unwrap_used, reason = "a test ends where its assumption fails")]

mod configs;
mod egress;
mod faults;
mod lifecycle;
mod nodes;
mod outages;
mod policy;
mod support;
