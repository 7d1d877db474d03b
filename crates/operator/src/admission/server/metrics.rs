//! What the accept loop counts.

use std::io;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the variant's name is the label's value")]
pub enum Closed {
    /// The peer closed it, or it was done.
    peer,
    error,
    handshake,
    idle,
    slow_header,
    /// A slow or idle one went, so that a newcomer could come in.
    made_room,
    /// A newcomer, while every connection had a request that waited for our answer.
    refused,
    shutdown,
}

/// Why a handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the variant's name is the label's value")]
pub enum Failure {
    timeout,
    /// The peer refused us; most often it does not trust our certificate.
    refused_by_peer,
    protocol,
}

impl Failure {
    pub(super) fn of(error: &io::Error) -> Self {
        let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        match tls {
            Some(rustls::Error::AlertReceived(_)) => Self::refused_by_peer,
            _ => Self::protocol,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClosedLabels {
    reason: Closed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    cause: Failure,
}

/// The accept loop's metrics, handed to [`super::serve`].
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    open: Gauge,
    closed: Family<ClosedLabels, Counter>,
    handshake_failures: Family<FailureLabels, Counter>,
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "groundcrew_webhook_connections",
            "Open connections to the webhook server",
            metrics.open.clone(),
        );
        registry.register(
            "groundcrew_webhook_connections_closed",
            "Connections of the webhook server that ended, by reason",
            metrics.closed.clone(),
        );
        registry.register(
            "groundcrew_webhook_handshake_failures",
            "TLS handshakes of the webhook server that failed, by cause",
            metrics.handshake_failures.clone(),
        );
        metrics
    }

    pub(super) fn opened(&self) {
        self.open.inc();
    }

    pub(super) fn closed(&self, reason: Closed) {
        self.open.dec();
        self.count(reason);
    }

    pub(super) fn refused(&self) {
        self.count(Closed::refused);
    }

    pub(super) fn handshake_failed(&self, cause: Failure) {
        self.handshake_failures.get_or_create(&FailureLabels { cause }).inc();
    }

    fn count(&self, reason: Closed) {
        self.closed.get_or_create(&ClosedLabels { reason }).inc();
    }

    #[cfg(test)]
    pub(super) fn open_now(&self) -> i64 {
        self.open.get()
    }

    #[cfg(test)]
    pub(super) fn closed_so_far(&self, reason: Closed) -> u64 {
        self.closed.get_or_create(&ClosedLabels { reason }).get()
    }
}
