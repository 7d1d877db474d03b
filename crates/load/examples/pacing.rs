//! How well a rate is kept, seen from the server: for this generator, or for whatever else is pointed at it.
//!
//! ```console
//! $ cargo run --release -p groundcrew-load --example pacing -- serve 30    # prints its port, judges anybody
//! $ cargo run --release -p groundcrew-load --example pacing -- send PORT   # ours, 1,000/s for 10 s
//! ```

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a program to read numbers from"
)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use groundcrew_core::warmup::outcome::Outcome;
use groundcrew_core::warmup::rules::Rules;
use groundcrew_load::call::Trace;
use groundcrew_load::engine::{Free, Progress};
use groundcrew_load::warm::{Ended, Work, warm};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

const RATE: u32 = 1_000;

type Arrivals = Arc<Mutex<Vec<Instant>>>;

async fn answer(mut tcp: TcpStream, arrivals: Arrivals) {
    let _ = tcp.set_nodelay(true);
    let mut buffer = [0; 4096];
    while let Ok(1..) = tcp.read(&mut buffer).await {
        arrivals.lock().unwrap().push(Instant::now());
        if tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.is_err() {
            return;
        }
    }
}

/// How far each request was from its place on an even grid through the first one.
fn print(arrivals: &[Instant]) {
    let mut off: Vec<i64> = arrivals
        .iter()
        .enumerate()
        .map(|(k, at)| (*at - arrivals[0]).as_micros() as i64 - (k as i64 * 1_000_000 / i64::from(RATE)))
        .collect();
    // The first one may itself be off; the median is where the grid really is.
    off.sort_unstable();
    let middle = off[off.len() / 2];
    let mut error: Vec<u64> = off.iter().map(|o| o.abs_diff(middle)).collect();
    error.sort_unstable();
    let at = |q: f64| error[((error.len() - 1) as f64 * q) as usize];
    println!(
        "{} requests, pacing error µs: p50 {} p90 {} p99 {} max {}",
        error.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
}

async fn serve(seconds: u64) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    let arrivals = Arrivals::default();
    let seen = arrivals.clone();
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            tokio::spawn(answer(tcp, seen.clone()));
        }
    });
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    print(&arrivals.lock().unwrap());
}

async fn send(port: u16) {
    let settings = [("requests", "10000"), ("duration", "10s"), ("port", &port.to_string())]
        .map(|(key, value)| (format!("kube-booster.io/warmup-{key}"), value.to_owned()));
    let rules = Rules::read::<String>(&std::collections::BTreeMap::from(settings), &[]).unwrap();
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    let work = Work {
        address,
        rules: &rules,
        scenario: None,
        sent_before: 0,
        trace: Trace::new(1),
        precise: true,
        max_queue_wait: Duration::ZERO,
    };
    let ended = warm(work, &Free, &CancellationToken::new(), &Progress::default()).await;
    if let Ended::With(Outcome::Ran(tally)) = ended {
        println!("{}/{} succeeded, P50 {:?}, P99 {:?}", tally.succeeded, tally.sent, tally.p50, tally.p99);
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = arguments.get(2).and_then(|n| n.parse::<u16>().ok());
    match (arguments.get(1).map(String::as_str), number) {
        (Some("serve"), seconds) => serve(seconds.unwrap_or(30).into()).await,
        (Some("send"), Some(port)) => send(port).await,
        _ => println!("pacing serve [SECONDS] | pacing send PORT"),
    }
}
