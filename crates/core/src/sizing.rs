//! DaemonSet pods fit the node they land on: each resource is a share of what the node has to give.
//!
//! ```text
//! pod ─► its DaemonSet ─► template ─┐
//!  └───► its node ─────► allocatable ┴─► decide ─► sizes at birth        (this file)
//!                                   └──► resize ─► the same, later on    (sizing/resize.rs)
//! ```

use std::fmt;

use serde::Serialize;

use crate::keys;
use crate::patch::{PodPatch, Sizes};
use crate::pod::{Place, PodView, Text};

pub mod resize;
mod shape;
mod split;
pub mod status;
mod template;
#[cfg(test)]
mod tests;

pub use shape::{Container, Qos, Role, Shape};
pub use template::{Amounts, Distribution, PerResource, Problem, Raw, Resource, Share, Template};

/// Which template a pod should have, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked<'a> {
    NotDaemonSet,
    /// Its DaemonSet has not been seen yet, so nobody knows.
    Unknown(&'a str),
    Nothing,
    Template(&'a str),
}

/// The DaemonSet that controls the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner<'a> {
    pub name: &'a str,
    pub uid: &'a str,
}

impl<'a> Owner<'a> {
    #[must_use]
    pub fn of(pod: &'a PodView<'_>) -> Option<Self> {
        let owner = pod.controller()?;
        let is_daemon_set = owner.kind.as_str() == "DaemonSet" && owner.api_version.as_str() == "apps/v1";
        is_daemon_set.then(|| Owner { name: owner.name.as_str(), uid: owner.uid.as_str() })
    }
}

impl<'a> Asked<'a> {
    /// The DaemonSet's word counts before its pod template's, which the pod carries.
    /// `daemon_set` is absent when it has not been seen, and holds the template it names otherwise.
    #[must_use]
    pub fn by(owner: Option<Owner<'a>>, daemon_set: Option<Option<&'a str>>, pod: Option<&'a str>) -> Self {
        let Some(owner) = owner else { return Asked::NotDaemonSet };
        match (daemon_set, pod) {
            (Some(Some(name)), _) | (_, Some(name)) => Asked::Template(name),
            (Some(None), None) => Asked::Nothing,
            (None, None) => Asked::Unknown(owner.name),
        }
    }
}

/// The template a pod carries from its DaemonSet's pod template.
#[must_use]
pub fn own_template<'a>(pod: &'a PodView<'_>) -> Option<&'a str> {
    let annotations = pod.metadata.annotations.as_ref()?;
    annotations.get(keys::RESOURCE_TEMPLATE).map(Text::as_str).filter(|name| !name.is_empty())
}

/// What the decision may look at.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    pub shape: &'a Shape,
    /// The shape of the DaemonSet's pod template, in whose proportions the containers share. The pod's own requests may
    /// be defaults of a LimitRange by now.
    pub declared: Option<&'a Shape>,
    pub asked: Asked<'a>,
    /// The template asked for; absent when there is none of that name.
    pub template: Option<&'a Result<Template, Problem>>,
    pub node: Option<&'a str>,
    /// What that node has to give; absent when there is no such node.
    pub allocatable: Option<&'a Result<Amounts, Problem>>,
}

/// What should happen to the pod, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    Leave(Why),
    Size(Sizing),
}

/// The sizes of one pod on one node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Sizing {
    pub template: String,
    pub node: String,
    pub totals: Amounts,
    pub containers: Vec<(Place, Amounts)>,
    /// The node is too small for the template's minimum of these.
    pub short: Vec<Resource>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Why {
    NotDaemonSet,
    NotAsked,
    /// The user sizes the pod as a whole.
    PodLevel,
    /// No node is named, so there is nothing to take a share of.
    NodeOpen,
    NothingToGive,
    DaemonSetUnseen(String),
    TemplateMissing(String),
    TemplateInvalid(String, Problem),
    NodeMissing(String),
    NodeInvalid(String, Problem),
}

#[must_use]
pub fn decide(seen: Seen<'_>) -> Verdict {
    match sizing(seen) {
        Ok(sizing) => Verdict::Size(sizing),
        Err(why) => Verdict::Leave(why),
    }
}

/// The sizes the pod should have.
fn sizing(seen: Seen<'_>) -> Result<Sizing, Why> {
    let name = match seen.asked {
        Asked::NotDaemonSet => return Err(Why::NotDaemonSet),
        Asked::Nothing => return Err(Why::NotAsked),
        Asked::Unknown(daemon_set) => return Err(Why::DaemonSetUnseen(daemon_set.to_owned())),
        Asked::Template(name) => name,
    };
    if seen.shape.pod_level {
        return Err(Why::PodLevel);
    }
    let template = seen.template.ok_or_else(|| Why::TemplateMissing(name.to_owned()))?;
    let template = template.as_ref().map_err(|problem| Why::TemplateInvalid(name.to_owned(), problem.clone()))?;
    let node = seen.node.ok_or(Why::NodeOpen)?;
    let allocatable = seen.allocatable.ok_or_else(|| Why::NodeMissing(node.to_owned()))?;
    let allocatable = allocatable.as_ref().map_err(|problem| Why::NodeInvalid(node.to_owned(), problem.clone()))?;
    let totals = template.totals(allocatable);
    if totals.is_empty() {
        return Err(Why::NothingToGive);
    }
    let sizes = template.split(allocatable, seen.shape, seen.declared.unwrap_or(seen.shape));
    let short = |resource: &Resource| template.shares.get(*resource).is_short(allocatable.of(*resource));
    Ok(Sizing {
        template: name.to_owned(),
        node: node.to_owned(),
        totals,
        containers: seen.shape.containers.iter().map(|container| container.place).zip(sizes).collect(),
        short: Resource::ALL.into_iter().filter(short).collect(),
    })
}

impl Verdict {
    /// The verdict as admission carries it out.
    pub fn contribute(&self, patch: &mut PodPatch) {
        let Verdict::Size(sizing) = self else { return };
        for (place, amounts) in &sizing.containers {
            let size = |resource: Resource| amounts.of(resource).map(|a| (resource.name(), resource.text(a)));
            let sizes: Sizes = Resource::ALL.into_iter().filter_map(size).collect();
            if !sizes.is_empty() {
                patch.size(*place, sizes);
            }
        }
    }

    /// What the user should hear: the pod is let through, but not as asked.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        let key = keys::RESOURCE_TEMPLATE;
        match self {
            Verdict::Leave(why) if why.is_failure() => Some(format!("{key}: pod not sized: {why}")),
            Verdict::Size(Sizing { node, template, short, .. }) if !short.is_empty() => {
                let names: Vec<_> = short.iter().map(|resource| resource.name()).collect();
                let names = names.join(", ");
                Some(format!("{key}: node {node:?} has less {names} than template {template:?} asks at least"))
            }
            _ => None,
        }
    }
}

impl Why {
    /// Somebody asked for sizes and does not get them.
    #[must_use]
    pub const fn is_failure(&self) -> bool {
        !matches!(self, Why::NotDaemonSet | Why::NotAsked | Why::PodLevel)
    }

    /// For metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Why::NotDaemonSet => "not_daemonset",
            Why::NotAsked => "not_asked",
            Why::PodLevel => "pod_level",
            Why::NodeOpen => "node_open",
            Why::NothingToGive => "nothing_to_give",
            Why::DaemonSetUnseen(_) => "daemonset_unseen",
            Why::TemplateMissing(_) => "template_missing",
            Why::TemplateInvalid(..) => "template_invalid",
            Why::NodeMissing(_) => "node_missing",
            Why::NodeInvalid(..) => "node_invalid",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::NotDaemonSet => f.write_str("no DaemonSet controls the pod"),
            Why::NotAsked => f.write_str("its DaemonSet names no template"),
            Why::PodLevel => f.write_str("the pod declares resources for itself as a whole"),
            Why::NodeOpen => f.write_str("the pod names no node"),
            Why::NothingToGive => f.write_str("the node reports nothing to take a share of"),
            Why::DaemonSetUnseen(name) => write!(f, "DaemonSet {name:?} has not been seen yet"),
            Why::TemplateMissing(name) => write!(f, "there is no FlexDaemonsetTemplate {name:?}"),
            Why::TemplateInvalid(name, problem) => write!(f, "FlexDaemonsetTemplate {name:?}: {problem}"),
            Why::NodeMissing(name) => write!(f, "there is no node {name:?}"),
            Why::NodeInvalid(name, problem) => write!(f, "allocatable of node {name:?}: {problem}"),
        }
    }
}
