//! Servers that never answer, drip, never end or explode: bounded in time and memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use groundcrew_core::warmup::outcome::Cut;
use support::{raw, read_head, run};
use tokio::io::AsyncWriteExt;

/// Far from what a stalled machine adds, and from what the longest timeout of a request, ten seconds, would make of it.
const SOON: Duration = Duration::from_secs(9);

#[tokio::test]
async fn a_server_that_never_answers_costs_the_request_its_timeout() {
    let address = raw(|mut tcp| async move {
        read_head(&mut tcp).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
    })
    .await;
    let ran = run(address, &[("requests", "3"), ("duration", "1s")]).await;
    assert_eq!((ran.tally().sent, ran.tally().failure.as_deref()), (3, Some("timed out (3)")));
    assert!(ran.took < SOON, "{:?}", ran.took);
}

#[tokio::test]
async fn the_cap_ends_what_its_requests_would_outlast() {
    let address = raw(|mut tcp| async move {
        read_head(&mut tcp).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
    })
    .await;
    let ran = run(address, &[("requests", "2"), ("duration", "30s"), ("timeout", "1s")]).await;
    assert_eq!(ran.tally().cut, Some(Cut::Cap(Duration::from_secs(1))));
    assert_eq!((ran.tally().sent, ran.tally().failure.as_deref()), (1, Some("cut off (1)")));
    assert!(ran.took < SOON, "{:?}", ran.took);
}

#[tokio::test]
async fn a_dripping_head_and_a_dripping_body_time_out() {
    for head in ["HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"] {
        let address = raw(move |mut tcp| async move {
            read_head(&mut tcp).await;
            let _ = tcp.write_all(head.as_bytes()).await;
            while tcp.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        let ran = run(address, &[("requests", "1"), ("duration", "1s")]).await;
        assert_eq!(ran.tally().failure.as_deref(), Some("timed out (1)"), "{head:?}");
        assert!(ran.took < SOON, "{:?}", ran.took);
    }
}

#[tokio::test]
async fn an_endless_body_is_read_up_to_a_mebibyte() {
    let written = Arc::new(AtomicUsize::new(0));
    let count = written.clone();
    let address = raw(move |mut tcp| {
        let count = count.clone();
        async move {
            read_head(&mut tcp).await;
            let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
            let chunk = [b"10000\r\n".as_slice(), &[b'x'; 65_536], b"\r\n"].concat();
            while tcp.write_all(&chunk).await.is_ok() {
                count.fetch_add(65_536, Ordering::Relaxed);
            }
        }
    })
    .await;
    let ran = run(address, &[("requests", "2"), ("mode", "asap"), ("duration", "10s")]).await;
    assert_eq!((ran.tally().sent, ran.tally().succeeded), (2, 2), "it answered, that is all that counts");
    assert!(ran.took < SOON, "{:?}", ran.took);
    // What it could write is what was read plus what sockets hold.
    assert!(written.load(Ordering::Relaxed) < 32 * 1024 * 1024, "{written:?}");
}

#[tokio::test]
async fn a_compressed_bomb_stays_what_it_is() {
    let address = raw(|mut tcp| async move {
        // A thousand zero bytes that claim to be gzip: nobody may try to inflate them.
        while read_head(&mut tcp).await {
            let head = "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 1000\r\n\r\n";
            let _ = tcp.write_all(&[head.as_bytes(), &[0; 1000]].concat()).await;
        }
    })
    .await;
    let ran = run(address, &[("requests", "5"), ("mode", "asap")]).await;
    assert_eq!(ran.tally().succeeded, 5);
}

#[tokio::test]
async fn an_endless_head_is_refused() {
    let address = raw(|mut tcp| async move {
        read_head(&mut tcp).await;
        let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\nx: ").await;
        while tcp.write_all(&[b'x'; 4096]).await.is_ok() {}
    })
    .await;
    let ran = run(address, &[("requests", "1"), ("duration", "5s")]).await;
    assert_eq!(ran.tally().failure.as_deref(), Some("not the protocol asked for (1)"));
    assert!(ran.took < SOON, "{:?}", ran.took);
}

#[tokio::test]
async fn garbage_and_sudden_ends_are_failures_with_a_name() {
    for (bytes, expected) in [
        (&b"SSH-2.0-OpenSSH_9.6\r\n"[..], "not the protocol asked for (1)"),
        (&b""[..], "connection closed early (1)"),
        (&b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"[..], "connection closed early (1)"),
    ] {
        let address = raw(move |mut tcp| async move {
            read_head(&mut tcp).await;
            let _ = tcp.write_all(bytes).await;
        })
        .await;
        let ran = run(address, &[("requests", "1"), ("duration", "1s")]).await;
        assert_eq!(ran.tally().failure.as_deref(), Some(expected), "{bytes:?}");
    }
}

#[tokio::test]
async fn only_the_final_answer_counts() {
    let address = raw(|mut tcp| async move {
        while read_head(&mut tcp).await {
            let _ =
                tcp.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n").await;
        }
    })
    .await;
    let ran = run(address, &[("requests", "2"), ("mode", "asap")]).await;
    assert_eq!(ran.tally().failure.as_deref(), Some("status 500 (2)"));
}

#[tokio::test]
async fn a_server_that_closes_idle_connections_gets_each_request_once() {
    let hits = Arc::new(AtomicUsize::new(0));
    let count = hits.clone();
    let address = raw(move |mut tcp| {
        let count = count.clone();
        async move {
            if read_head(&mut tcp).await {
                count.fetch_add(1, Ordering::Relaxed);
                let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
            }
        }
    })
    .await;
    let ran = run(address, &[("requests", "10"), ("duration", "1s")]).await;
    assert_eq!((ran.tally().succeeded, hits.load(Ordering::Relaxed)), (10, 10), "{:?}", ran.tally());
}

#[tokio::test]
async fn a_slow_server_does_not_slow_the_pace() {
    let arrivals = Arc::new(AtomicUsize::new(0));
    let count = arrivals.clone();
    let address = raw(move |mut tcp| {
        let count = count.clone();
        async move {
            while read_head(&mut tcp).await {
                count.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(700)).await;
                let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
            }
        }
    })
    .await;
    let ran = run(address, &[("requests", "50"), ("duration", "1s")]).await;
    assert_eq!(arrivals.load(Ordering::Relaxed), 50);
    assert!(ran.took < SOON, "{:?}", ran.took);
    assert!(ran.tally().p50 >= Duration::from_millis(690), "{:?}", ran.tally());
}
