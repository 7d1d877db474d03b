//! More peers than places, and most of them mean no good.

use super::*;

const HALF_A_REQUEST: &[u8] = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{";

/// The `count`th of them, when its header has been read.
async fn half_sent(scene: &Scene, count: usize) -> Io {
    let mut stream = scene.connect(b"http/1.1").await.unwrap();
    stream.write_all(HALF_A_REQUEST).await.unwrap();
    stream.flush().await.unwrap();
    scene.in_flight(count).await;
    stream
}

#[tokio::test]
async fn bodies_that_do_not_come_make_room_at_once_the_longest_awaited_first() {
    let scene = Scene::start(Limits { connections: 2, linger: Duration::from_secs(30), ..limits() }).await;
    let (mut first, mut second) = (half_sent(&scene, 1).await, half_sent(&scene, 2).await);
    let mut third = scene.http1().await;
    closed_by_server(&mut first).await;
    assert_eq!(third.get("/").await.unwrap(), "hello");
    second.write_all(&[b' '; 4999]).await.unwrap();
    let mut answer = [0; 12];
    timeout(Duration::from_secs(5), second.read_exact(&mut answer)).await.expect("no answer").unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200", "who came later is heard out");
    assert_eq!(scene.metrics.closed_so_far(Closed::refused), 0);
}

#[tokio::test]
async fn who_has_asked_before_is_not_sent_away_for_who_sends_half_a_request() {
    let scene = Scene::start(limits()).await;
    let mut regular = scene.http2().await;
    assert_eq!(regular.get("/").await.unwrap(), "hello");
    let mut writers = Vec::new();
    for count in 1..=40 {
        writers.push(half_sent(&scene, count).await);
    }
    assert_eq!(regular.get("/").await.unwrap(), "hello");
    assert_eq!(scene.http2().await.get("/").await.unwrap(), "hello");
    assert_eq!(scene.metrics.closed_so_far(Closed::refused), 0);
}

#[tokio::test]
async fn an_answer_that_nobody_takes_makes_room() {
    let scene = Scene::start(Limits { connections: 2, ..limits() }).await;
    let mut waiting = Vec::new();
    for _ in 0..2 {
        let io = TokioIo::new(scene.connect(b"h2").await.unwrap());
        let mut http = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        // No byte of a body may come to this client.
        let (mut client, connection) =
            http.initial_stream_window_size(0).handshake::<_, Full<Bytes>>(io).await.unwrap();
        tokio::spawn(connection);
        waiting.push(client.send_request(request("/")).await.unwrap());
    }
    assert_eq!(scene.http1().await.get("/").await.unwrap(), "hello");
}

#[tokio::test]
async fn newcomers_do_not_push_each_other_out_while_others_are_idle() {
    let scene = Scene::start(limits()).await;
    let mut idle = Vec::new();
    for _ in 0..limits().connections {
        let mut client = scene.http1().await;
        assert_eq!(client.get("/").await.unwrap(), "hello");
        idle.push(client);
    }
    let newcomer = TcpStream::connect(scene.address).await.unwrap();
    let mut others = Vec::new();
    for _ in 0..3 {
        others.push(TcpStream::connect(scene.address).await.unwrap());
    }
    eventually("all came in", || scene.metrics.closed_so_far(Closed::made_room) == 4).await;
    let newcomer = secure(newcomer, &scene.ca, b"http/1.1").await.unwrap();
    assert_eq!(Http1::over(newcomer).await.get("/").await.unwrap(), "hello");
}
