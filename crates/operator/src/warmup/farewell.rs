//! Leaves no gate shut that nobody will open: `groundcrew open-gates`, and where the feature was turned off.
//!
//! Turned off, the agents' leases tell whether it was ever on: without one no gate is ours, for admission adds none while
//! no agent lives. They are deleted last, so a leader that comes in between goes on.

use std::time::Duration;

use groundcrew_core::feature::Feature;
use groundcrew_core::warmup::backstop::farewell;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::agents::{Agents, beat};
use super::{Facts, Pod, agent_leases};
use crate::cli::Settings;
use crate::manifests::rule;
use crate::run::{Context, WATCH_TIMEOUT, runtime};
use crate::runtime::apply::{self, Metrics, Outcome, Target, Write, Writer};
use crate::runtime::client::{self, Clients};

const CALL: Duration = Duration::from_secs(30);
const PAGE: u32 = 500;
/// Nobody waits for an agent that has been silent for so long; its node is gone.
const LOST: Duration = Duration::from_secs(24 * 3600);
/// Between the first looks, and how long no agent may be left before the last one: replicas of before hear of it by watch, and
/// a pod that they have just given a gate must be there to be seen.
const AGAIN: Duration = Duration::from_secs(10);
/// Between later ones: each lists every pod.
const LATER: Duration = Duration::from_secs(60);

/// Opens them all, whoever leads: turn admission off first, or new ones are added meanwhile.
pub fn main(settings: &Settings) -> Result<(), String> {
    runtime()?.block_on(async {
        let config = client::load(settings.kubeconfig.as_deref()).await.map_err(|e| e.to_string())?;
        let clients = Clients::new(&config, WATCH_TIMEOUT).map_err(|e| e.to_string())?;
        let opened = open(&clients).await?;
        say(&format!("{opened} gates opened"));
        Ok(())
    })
}

/// Opens every shut gate; says how many there were.
pub async fn open(clients: &Clients) -> Result<u32, String> {
    let writer = Writer::for_any_replica(clients.write.clone(), Metrics::default());
    let (opened, failed) = open_all(clients.read.clone(), &writer, "groundcrew is being removed").await?;
    if failed == 0 { Ok(opened) } else { Err(format!("{failed} gates could not be opened; run it again")) }
}

/// What a feature that is off may still do: take back what it did while it was on.
#[must_use]
pub fn permissions() -> Vec<PolicyRule> {
    vec![rule("", &["pods"], &["list"], &[]), rule("", &["pods/status"], &["patch"], &[])]
}

/// For a feature that is off: once no agent is left, opens gates until none is shut, then deletes the agents' leases.
pub fn start(context: &Context) {
    let context = context.clone();
    context.tasks.clone().spawn(context.stopping.clone().run_until_cancelled_owned(async move {
        let agents = Agents::new(context.config.warmup.agent_timeout);
        let mut leader = context.leadership.watch();
        let (mut alone_since, mut pause) = (None, AGAIN);
        while leader.wait_for(|leads| *leads).await.is_ok() {
            match retire(&context, &agents, &mut alone_since).await {
                Ok(true) => return,
                Ok(false) => {}
                Err(why) => warn!(why, "warmup is off and could not open every gate yet, trying again"),
            }
            sleep(pause).await;
            pause = (2 * pause).min(LATER);
        }
    }));
}

/// One look; true when nothing is left to be taken back.
async fn retire(context: &Context, agents: &Agents, alone_since: &mut Option<Instant>) -> Result<bool, String> {
    let Context { clients, writer, namespace, .. } = context;
    let leases: Api<Lease> = Api::namespaced(clients.read.clone(), namespace);
    let leases = in_time("leases", leases.list(&ListParams::default().labels(&agent_leases()))).await?.items;
    if leases.is_empty() {
        return Ok(true);
    }
    for lease in &leases {
        agents.hear(&lease.name_any(), Some(beat(lease.clone())));
    }
    // An agent that lives opens its own gates. This may be a replica of the old configuration, in a rollout that turns
    // the feature on again.
    if agents.any_alive() {
        *alone_since = None;
        return Ok(false);
    }
    let alone_since = alone_since.get_or_insert_with(Instant::now);
    let (opened, failed) = open_all(clients.read.clone(), writer, "warm-up is turned off").await?;
    if failed > 0 {
        return Err(format!("{failed} gates could not be opened"));
    }
    if opened > 0 {
        info!(opened, "warmup is off: gates opened");
        return Ok(false);
    }
    if alone_since.elapsed() < AGAIN {
        return Ok(false);
    }
    for lease in &leases {
        delete(writer, lease).await?;
    }
    info!(leases = leases.len(), "warmup is off: nothing of it is left");
    Ok(true)
}

/// Unless it has changed.
async fn delete(writer: &Writer, lease: &Lease) -> Result<(), String> {
    let (name, version) = (lease.name_any(), lease.resource_version());
    let target = Target::of::<Lease>(lease.namespace().as_deref(), &name, &lease.uid().unwrap_or_default());
    match writer.write(Feature::Warmup, &target, &Write::Delete { version }).await {
        Ok(Outcome::Done(_) | Outcome::Gone) => Ok(()),
        other => Err(format!("lease {name} could not be deleted: {other:?}")),
    }
}

/// Deletes the leases of nodes that are gone, for ever; leases of nodes that come back are made anew.
pub(super) async fn forget_lost_agents(context: Context, agents: Agents) {
    let leases: Api<Lease> = Api::namespaced(context.clients.read.clone(), &context.namespace);
    loop {
        sleep(LOST / 24).await;
        agents.forget_absent(LOST);
        for name in agents.silent(LOST) {
            let Ok(Ok(Some(lease))) = timeout(CALL, leases.get_opt(&name)).await else { continue };
            agents.hear(&name, Some(beat(lease.clone())));
            if !agents.silent(LOST).contains(&name) || !context.leadership.is_leader() {
                continue;
            }
            match delete(&context.writer, &lease).await {
                Ok(()) => info!(lease = name, "lease of an agent that is gone deleted"),
                Err(why) => warn!(why, "the lease of an agent that is gone stays for now"),
            }
        }
    }
}

async fn in_time<T>(what: &str, call: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
    match timeout(CALL, call).await {
        Ok(answer) => answer.map_err(|e| format!("{what} could not be listed: {e}")),
        Err(_) => Err(format!("{what} could not be listed in time")),
    }
}

async fn open_all(client: Client, writer: &Writer, why: &str) -> Result<(u32, u32), String> {
    let pods: Api<Pod> = Api::all(client);
    let (mut opened, mut failed) = (0, 0);
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = in_time("pods", pods.list(&page)).await?;
        for pod in list.items {
            let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
            let facts = Facts::of(pod);
            let Some(write) = farewell(&facts.seen(), why) else { continue };
            let patch = Write::StatusPatch(write.patch(&facts.uid, None, Some(false), Timestamp::now()));
            match writer.write(Feature::Warmup, &apply::pod(&namespace, &name, &facts.uid), &patch).await {
                Ok(Outcome::Done(_)) => opened += 1,
                Ok(Outcome::Gone) => {}
                _ => failed += 1,
            }
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok((opened, failed)),
        }
    }
}

#[allow(clippy::print_stdout, reason = "the command line's own output")]
fn say(text: &str) {
    println!("{text}");
}
