//! Logs, spans and where they go.

use std::time::Duration;

use groundcrew_core::config::{Config, LogFormat};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::runtime::Tokio;
use opentelemetry_sdk::trace::SdkTracerProvider;
use opentelemetry_sdk::trace::span_processor_with_async_runtime::BatchSpanProcessor;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

/// A collector that does not answer must not keep the process: what is left of the ten seconds a shutdown may take.
const LAST_SPANS: Duration = Duration::from_millis(800);

/// Flushes the spans that are still queued when the process ends.
#[derive(Debug, Default)]
pub struct Telemetry {
    spans: Option<SdkTracerProvider>,
}

impl Telemetry {
    /// Starts logging; call once, inside the runtime.
    pub fn start(config: &Config) -> Result<Self, String> {
        let level = config.logging.level.name();
        // RUST_LOG narrows or widens single modules while hunting a bug.
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
        let lines: Box<dyn Layer<Registry> + Send + Sync> = match config.logging.format {
            LogFormat::Json => fmt::layer().json().flatten_event(true).with_writer(std::io::stderr).boxed(),
            LogFormat::Text => fmt::layer().with_ansi(false).with_writer(std::io::stderr).boxed(),
        };
        let spans = config.tracing.otlp_endpoint.as_deref().map(exporter).transpose()?;
        let traces = spans.as_ref().map(|p| tracing_opentelemetry::layer().with_tracer(p.tracer("groundcrew")));
        let subscriber = tracing_subscriber::registry().with(lines).with(traces).with(filter);
        subscriber.try_init().map_err(|e| format!("cannot start logging: {e}"))?;
        log_panics();
        Ok(Self { spans })
    }

    /// The exporter runs on this runtime, so it is waited for elsewhere: with one thread it could never finish. That
    /// wait has a deadline of its own, longer than ours: see [`crate::run::block_on`].
    pub async fn flush(self) {
        let Some(spans) = self.spans else { return };
        let sent = tokio::task::spawn_blocking(move || spans.shutdown().map_err(|e| e.to_string()));
        let sent = match tokio::time::timeout(LAST_SPANS, sent).await {
            Ok(Ok(sent)) => sent,
            Ok(Err(e)) => Err(e.to_string()),
            Err(e) => Err(e.to_string()),
        };
        if let Err(error) = sent {
            tracing::warn!(error, "the last spans could not be sent");
        }
    }
}

fn exporter(endpoint: &str) -> Result<SdkTracerProvider, String> {
    let exporter = SpanExporter::builder()
        .with_http()
        .with_endpoint(format!("{}/v1/traces", endpoint.trim_end_matches('/')))
        .build()
        .map_err(|e| format!("tracing.otlpEndpoint {endpoint:?} cannot be used: {e}"))?;
    let resource = Resource::builder()
        .with_service_name("groundcrew")
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build();
    // The plain batch processor exports from a thread without a runtime, where the HTTP client panics.
    let batches = BatchSpanProcessor::builder(exporter, Tokio).build();
    Ok(SdkTracerProvider::builder().with_span_processor(batches).with_resource(resource).build())
}

/// A panic is one log line like any other; what it cost is decided where it is caught.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!(location = panic.location().map(ToString::to_string), "{panic}");
    }));
}
