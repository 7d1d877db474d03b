//! The smallest HTTP client that can read a health or metrics page on this machine.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A page that does not come within this time on the loopback address will not come.
const PATIENCE: Duration = Duration::from_secs(10);

/// Status and body of `GET http://<address><path>`.
///
/// # Errors
/// Nobody listens, no answer within ten seconds, or not HTTP.
pub async fn get(address: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let answer = tokio::time::timeout(PATIENCE, exchange(address, path)).await;
    let text = answer.with_context(|| format!("no answer from http://{address}{path}"))??;
    let (head, body) = text.split_once("\r\n\r\n").context("not an HTTP answer")?;
    let status = head.split_whitespace().nth(1).context("no status in the HTTP answer")?;
    Ok((status.parse()?, body.to_owned()))
}

/// HTTP/1.0: the server closes the connection at the end of the body and may not use chunks.
async fn exchange(address: SocketAddr, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn status_and_body_come_back() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 256];
            let read = stream.read(&mut request).await.unwrap();
            assert!(request[..read].starts_with(b"GET /readyz HTTP/1.0\r\n"));
            stream.write_all(b"HTTP/1.0 503 Not yet\r\nX: y\r\n\r\nwarming up").await.unwrap();
        });
        assert_eq!(super::get(address, "/readyz").await.unwrap(), (503, "warming up".to_owned()));
    }
}
