//! Which port of the pod a warm-up goes to.

use crate::keys::WARMUP_PORT;
use crate::pod::{Container, ContainerPort, HttpGet, IntOrName};

/// What `warmup-port` says.
pub(super) enum Asked<'a> {
    Nothing,
    Number(u16),
    Name(&'a str),
}

/// Digits are a number, anything else a name.
pub(super) fn asked(text: Option<&str>) -> Result<Asked<'_>, String> {
    let Some(text) = text else { return Ok(Asked::Nothing) };
    match text.parse::<i64>() {
        Ok(number) => in_range(number).map(Asked::Number).ok_or_else(|| out_of_range(number)),
        Err(_) if text.bytes().all(|b| b.is_ascii_digit()) => Err(out_of_range(text)),
        Err(_) => Ok(Asked::Name(text)),
    }
}

fn out_of_range(got: impl std::fmt::Display) -> String {
    format!("warmup-port must be between 1 and 65535, got {got}")
}

fn in_range(number: i64) -> Option<u16> {
    u16::try_from(number).ok().filter(|n| *n > 0)
}

/// The port of that name, wherever it is declared.
pub(super) fn named<S: AsRef<str>>(containers: &[Container<S>], name: &str) -> Result<u16, String> {
    let spelled = |port: &&ContainerPort<S>| port.name.as_ref().is_some_and(|n| n.as_ref() == name);
    let mut found: Vec<&ContainerPort<S>> = containers.iter().flat_map(ports).filter(spelled).collect();
    let invalid = |why: &str| Err(format!("invalid warmup-port value {name:?}: {why}"));
    if found.is_empty() {
        return invalid("no container has a port of that name");
    }
    found.retain(|port| is_tcp(port));
    found.dedup_by_key(|port| port.container_port);
    match found.as_slice() {
        [] => invalid("the port of that name is not a TCP port"),
        [one] => in_range(one.container_port).ok_or_else(|| out_of_range(one.container_port)),
        _ => invalid("several containers have different ports of that name; give the number"),
    }
}

/// The single TCP port of the single container.
pub(super) fn detected<S: AsRef<str>>(containers: &[Container<S>]) -> Result<u16, String> {
    let container = match containers {
        [one] => one,
        [] => return Err(nothing_to_detect()),
        _ => {
            return Err(format!(
                "pod has multiple containers, please specify warmup port using annotation {WARMUP_PORT}"
            ));
        }
    };
    let tcp: Vec<&ContainerPort<S>> = ports(container).filter(|port| is_tcp(port)).collect();
    match tcp.as_slice() {
        [] => Err(nothing_to_detect()),
        [one] => in_range(one.container_port).ok_or_else(|| out_of_range(one.container_port)),
        _ => Err(format!(
            "container {:?} has multiple ports, please specify warmup port using annotation {WARMUP_PORT}",
            container.name.as_ref()
        )),
    }
}

fn nothing_to_detect() -> String {
    format!(
        "cannot determine warmup port: no container ports found, please specify warmup port using annotation {WARMUP_PORT}"
    )
}

/// Where the one HTTP readiness probe of the pod goes. Its `host` is never followed.
pub(super) fn probe<S: AsRef<str>>(containers: &[Container<S>]) -> Result<(&Container<S>, &HttpGet<S>), &'static str> {
    let http = |c| Some((c, Container::<S>::http_probe(c)?));
    let mut found = containers.iter().filter_map(http);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (None, _) => Err("no container has an HTTP readiness probe"),
        (Some(_), Some(_)) => Err("several containers have an HTTP readiness probe"),
    }
}

/// A probe names a port of its own container.
pub(super) fn of_probe<S: AsRef<str>>(container: &Container<S>, probe: &HttpGet<S>) -> Result<u16, String> {
    match &probe.port {
        IntOrName::Int(number) => in_range(*number).ok_or_else(|| out_of_range(*number)),
        IntOrName::Name(name) => named(std::slice::from_ref(container), name.as_ref()),
    }
}

fn ports<S>(container: &Container<S>) -> impl Iterator<Item = &ContainerPort<S>> {
    container.ports.iter().flatten()
}

/// TCP is what an absent protocol means.
fn is_tcp<S: AsRef<str>>(port: &ContainerPort<S>) -> bool {
    port.protocol.as_ref().is_none_or(|protocol| protocol.as_ref() == "TCP")
}

impl<S> Container<S> {
    fn http_probe(&self) -> Option<&HttpGet<S>> {
        self.readiness_probe.as_ref()?.http_get.as_ref()
    }
}
