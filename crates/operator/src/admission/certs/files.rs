//! Certificates that someone else keeps in a directory: cert-manager, or a person.
//!
//! Looks at the contents once a second. Watching the directory would be quicker and wrong in new ways: a Secret volume
//! changes by swapping a symlink two levels up, and not every file system tells.
//!
//! # Guarantees
//! - A pair is served once it parses, its key fits and it has not expired; until then the old one stays.
//! - A leaf of a new CA is held back until that CA is published: the kubelets of other replicas may be first, and only
//!   the leader publishes. Not where the pair before it is no good any more, and never for longer than [`OVERLAP`].
//! - An expired pair is served while nothing better was ever there, and replaced as soon as a valid one appears.
//! - A replaced CA stays in the bundle for [`OVERLAP`]: kubelets refresh the volumes of replicas up to two minutes apart.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::{Clock, Published, Source, Trust};
use crate::admission::tls::{self, Pair, PairError, ServingCert};

#[cfg(test)]
mod tests;

const LOOK_EVERY: Duration = Duration::from_secs(1);
const OVERLAP: Duration = Duration::from_secs(180);
/// From the time we see a bundle until every API server has heard of it.
const HEARD_OF: Duration = Duration::from_secs(5);

/// What callers get at once, and the work that keeps it true until `shutdown`.
pub fn prepare(
    directory: PathBuf,
    serving: Arc<ServingCert>,
    clock: Clock,
    published: watch::Receiver<Option<Published>>,
    shutdown: CancellationToken,
) -> (Source, impl Future<Output = ()> + Send) {
    let trust = watch::Sender::new(Trust::Unknown);
    // Each replica has the files themselves: there is nothing to read anew when one of them begins to lead.
    let confirmed = watch::Sender::new(true);
    let source = Source { trust: trust.subscribe(), confirmed: confirmed.subscribe() };
    let keeper = Keeper {
        directory,
        serving,
        clock,
        trust,
        published,
        last_published: None,
        seen: None,
        held: None,
        bundle: Bundle::default(),
    };
    (source, async move {
        shutdown.run_until_cancelled(keeper.run()).await.unwrap_or(());
        drop(confirmed);
    })
}

/// The files as last read, to act only on a change.
#[derive(PartialEq, Eq)]
struct Files {
    cert: Vec<u8>,
    key: Vec<u8>,
    ca: Option<Vec<u8>>,
}

impl Files {
    async fn read(directory: &Path) -> io::Result<Self> {
        let ca = match tokio::fs::read(directory.join("ca.crt")).await {
            // cert-manager writes an empty one for issuers without a CA of their own.
            Ok(ca) => Some(ca).filter(|ca| !ca.trim_ascii().is_empty()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let cert = tokio::fs::read(directory.join("tls.crt")).await?;
        let key = tokio::fs::read(directory.join("tls.key")).await?;
        Ok(Self { cert, key, ca })
    }
}

struct Keeper {
    directory: PathBuf,
    serving: Arc<ServingCert>,
    clock: Clock,
    trust: watch::Sender<Trust>,
    published: watch::Receiver<Option<Published>>,
    /// Whom callers were last seen to trust; between two writes of the leader they may not agree.
    last_published: Option<Published>,
    /// The last usable pair of the directory that is not served yet, and since when anything has been held back.
    held: Option<(Pair, Instant)>,
    /// The last contents or error that was acted on, so that each is told once.
    seen: Option<Result<Files, String>>,
    bundle: Bundle,
}

impl Keeper {
    async fn run(mut self) {
        let mut ticks = interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let files = Files::read(&self.directory).await.map_err(|error| error.to_string());
            if self.seen.as_ref() != Some(&files) {
                match &files {
                    Ok(files) => self.take(files),
                    Err(error) => {
                        warn!(directory = %self.directory.display(), %error, "cannot read the certificate files");
                    }
                }
                self.seen = Some(files);
            }
            self.announce();
            self.serve_what_is_trusted();
        }
    }

    fn take(&mut self, files: &Files) {
        let directory = self.directory.display();
        match self.usable(files) {
            Ok(pair) => {
                info!(%directory, not_after = %pair.facts().validity.not_after, "certificate files read");
                // Trust first: in this order nobody sees a leaf before its CA.
                self.bundle.renew(files.ca.as_deref());
                let since = self.held.take().map_or_else(Instant::now, |(_, since)| since);
                self.held = Some((pair, since));
            }
            Err(error) => {
                error!(%directory, %error, "the certificate files cannot be used, the pair before them stays");
            }
        }
    }

    fn usable(&self, files: &Files) -> Result<Pair, PairError> {
        if let Some(ca) = &files.ca {
            for certificate in tls::certificates(ca)? {
                tls::facts(&certificate)?;
            }
        }
        match Pair::valid_from_pem(&files.cert, &files.key, (self.clock)()) {
            Err(PairError::Expired(at)) if self.serving.facts().is_none() => {
                error!(%at, "the certificate has expired; serving it for want of another");
                Pair::from_pem(&files.cert, &files.key)
            }
            usable => usable,
        }
    }

    fn serve_what_is_trusted(&mut self) {
        if let Some(published) = &*self.published.borrow() {
            self.last_published = Some(published.clone());
        }
        let Some((new, since)) = self.held.take() else { return };
        let known = self.last_published.as_ref();
        let roots = known.map(|known| tls::certificates(&known.bundle).unwrap_or_default());
        let trusts = |pair: &Pair| roots.as_ref().is_none_or(|roots| pair.trusted_by(roots));
        let is_heard = known.is_none_or(|known| known.since.elapsed() >= HEARD_OF);
        let now = (self.clock)();
        let before = self.serving.pair();
        let before_is_good = before.is_some_and(|before| !before.facts().validity.expired(now) && trusts(&before));
        if before_is_good && !(trusts(&new) && is_heard) && since.elapsed() < OVERLAP {
            debug!("the new certificate waits until its CA is published");
            self.held = Some((new, since));
            return;
        }
        info!(not_after = %new.facts().validity.not_after, "serving certificate loaded");
        self.serving.swap(new);
    }

    fn announce(&mut self) {
        let Some(trust) = self.bundle.trust() else { return };
        self.trust.send_if_modified(|told| {
            let changed = *told != trust;
            *told = trust;
            changed
        });
    }
}

/// The CAs to trust: those in the file, and for a while those that were in it before.
#[derive(Default)]
struct Bundle {
    loaded: bool,
    current: Vec<u8>,
    before: Vec<(Vec<u8>, Instant)>,
}

impl Bundle {
    fn renew(&mut self, ca: Option<&[u8]>) {
        let ca = ca.unwrap_or_default();
        if self.loaded && self.current != ca && !self.current.is_empty() {
            self.before.push((self.current.clone(), Instant::now()));
        }
        self.before.retain(|(before, _)| before != ca);
        self.current = ca.to_vec();
        self.loaded = true;
    }

    fn trust(&mut self) -> Option<Trust> {
        self.before.retain(|(_, replaced)| replaced.elapsed() < OVERLAP);
        if !self.loaded {
            return None;
        }
        if self.current.is_empty() {
            return Some(Trust::External);
        }
        let mut pem = self.current.trim_ascii_end().to_vec();
        pem.push(b'\n');
        for (before, _) in &self.before {
            pem.extend_from_slice(before.trim_ascii_end());
            pem.push(b'\n');
        }
        Some(Trust::Offered(pem.into()))
    }
}
