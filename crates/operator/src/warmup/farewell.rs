//! `groundcrew open-gates`: the last thing before an uninstallation.

use std::time::Duration;

use groundcrew_core::feature::Feature;
use groundcrew_core::warmup::backstop::farewell;
use jiff::Timestamp;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use tokio::time::timeout;

use super::{Facts, Pod};
use crate::cli::Settings;
use crate::run::{WATCH_TIMEOUT, runtime};
use crate::runtime::apply::{self, Metrics, Outcome, Write, Writer};
use crate::runtime::client::{self, Clients};

const CALL: Duration = Duration::from_secs(30);
const PAGE: u32 = 500;

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
    let (opened, failed) = open_all(clients.read.clone(), &writer).await?;
    if failed == 0 { Ok(opened) } else { Err(format!("{failed} gates could not be opened; run it again")) }
}

async fn open_all(client: Client, writer: &Writer) -> Result<(u32, u32), String> {
    let pods: Api<Pod> = Api::all(client);
    let (mut opened, mut failed) = (0, 0);
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = timeout(CALL, pods.list(&page)).await.map_err(|_| "pods could not be listed in time")?;
        let list = list.map_err(|e| format!("pods could not be listed: {e}"))?;
        for pod in list.items {
            let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
            let facts = Facts::of(pod);
            let Some(write) = farewell(&facts.seen()) else { continue };
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
