//! A webhook that every eviction must pass: it holds or refuses them as the test says.
//!
//! The API server asks it before it looks at the pod and its budgets, so what the test changes while an eviction is held
//! is what the API server then finds.

use axum::Json;
use axum::extract::State;
use axum::routing::post;
use groundcrew::admission::{server, tls};
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::ValidatingWebhookConfiguration;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Allow,
    Refuse(u16),
    /// No answer until the test says another.
    Hold,
}

/// What is answered to a dry run, and to an eviction in earnest.
#[derive(Clone, Copy, Debug)]
struct Answers {
    dry: Answer,
    earnest: Answer,
}

/// Evictions that came, by whether they were dry runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    pub dry: usize,
    pub earnest: usize,
}

#[derive(Clone)]
struct Shared {
    answers: watch::Receiver<Answers>,
    asked: watch::Sender<Asked>,
}

pub struct Gate {
    answers: watch::Sender<Answers>,
    asked: watch::Receiver<Asked>,
    stop: CancellationToken,
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Gate {
    /// Every eviction in the cluster passes it when this returns.
    pub async fn put_up(cluster: &Cluster) -> anyhow::Result<Self> {
        let certificate = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()])?;
        let pem = certificate.cert.pem();
        let pair = tls::Pair::from_pem(pem.as_bytes(), certificate.signing_key.serialize_pem().as_bytes())?;
        let mut registry = Registry::default();
        let serving = tls::ServingCert::register(&mut registry);
        serving.swap(pair);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("https://{}/", listener.local_addr()?);
        let (answers, watched) = watch::channel(Answers { dry: Answer::Allow, earnest: Answer::Allow });
        let (counted, asked) = watch::channel(Asked::default());
        let router = axum::Router::new().route("/", post(answer));
        let router = router.with_state(Shared { answers: watched, asked: counted });
        let stop = CancellationToken::new();
        let metrics = server::Metrics::register(&mut registry);
        tokio::spawn(server::serve(listener, serving, router, server::Limits::default(), stop.clone(), metrics));
        let gate = Self { answers, asked, stop };
        gate.register(cluster, &url, pem.as_bytes()).await?;
        Ok(gate)
    }

    async fn register(&self, cluster: &Cluster, url: &str, ca: &[u8]) -> anyhow::Result<()> {
        let hook = serde_json::from_value::<ValidatingWebhookConfiguration>(json!({
            "metadata": {"name": "gate"},
            "webhooks": [{
                "name": "gate.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None",
                "failurePolicy": "Fail", "timeoutSeconds": 30,
                "clientConfig": {"url": url, "caBundle": ByteString(ca.to_vec())},
                "rules": [{
                    "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/eviction"], "operations": ["CREATE"],
                }],
            }],
        }))?;
        Api::all(cluster.client()).create(&PostParams::default(), &hook).await?;
        // Nothing shows when the API server uses it, but that it does.
        let pods: Api<Pod> = Api::namespaced(cluster.client(), "default");
        let began = tokio::time::Instant::now();
        while self.asked() == Asked::default() {
            anyhow::ensure!(began.elapsed() < SOON, "the API server does not ask the gate");
            let _ = pods.evict("nobody", &kube::api::EvictParams::default()).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    pub fn answer(&self, dry: Answer, earnest: Answer) {
        self.answers.send_replace(Answers { dry, earnest });
    }

    pub fn asked(&self) -> Asked {
        *self.asked.borrow()
    }

    pub async fn wait_asked(&self, what: &str, holds: impl Fn(Asked) -> bool) -> anyhow::Result<()> {
        let mut asked = self.asked.clone();
        let waited = tokio::time::timeout(SOON, asked.wait_for(|now| holds(*now))).await;
        waited.with_context(|| format!("not asked: {what}, {:?}", self.asked()))??;
        Ok(())
    }
}

async fn answer(State(shared): State<Shared>, Json(review): Json<Value>) -> Json<Value> {
    let dry = review.pointer("/request/dryRun").is_some_and(|dry| dry == true);
    shared.asked.send_modify(|asked| if dry { asked.dry += 1 } else { asked.earnest += 1 });
    let mut answers = shared.answers.clone();
    let mine = |all: &Answers| if dry { all.dry } else { all.earnest };
    let decided = answers.wait_for(|all| mine(all) != Answer::Hold).await.map(|all| mine(&all));
    let status = match decided {
        Ok(Answer::Refuse(code)) => json!({"code": code, "message": "refused by the test"}),
        _ => Value::Null,
    };
    Json(json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "response": {"uid": review.pointer("/request/uid"), "allowed": status.is_null(), "status": status},
    }))
}
