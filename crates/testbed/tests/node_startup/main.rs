//! `node_startup` on a real API server: judged by what it stored and by its audit log.

mod births;
mod releases;
mod rules;
mod scale;
mod support;
mod writers;
