//! What pods ask for and nodes have, of every resource there is.

use std::collections::BTreeMap;

use crate::quantity;
use crate::selector::Labels;

/// Processor time in thousandths, everything else in whole units.
///
/// The resources that nearly every pod has are fields: there are as many amounts as pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    cpu: i64,
    memory: i64,
    pods: i64,
    others: BTreeMap<String, i64>,
}

impl Amount {
    /// From a list of resources; what cannot be read counts as nothing.
    #[must_use]
    pub fn of(resources: &Labels) -> Self {
        let mut amount = Self::default();
        for (name, text) in resources {
            let Ok(quantity) = quantity::parse(text) else { continue };
            let count = if name == "cpu" { quantity.millis() } else { quantity.units() };
            amount.change(name, |_| count.unwrap_or(0));
        }
        amount
    }

    /// What a pod asks for: its containers and sidecars together, or what an init container needs beside the sidecars
    /// before it, whichever is more; instead what is asked for the pod as a whole; and its overhead on top.
    #[must_use]
    pub fn of_pod(
        containers: impl Iterator<Item = Labels>,
        init: impl Iterator<Item = (bool, Labels)>,
        whole: &Labels,
        overhead: &Labels,
    ) -> Self {
        let (mut running, mut sidecars, mut largest) = (Self::default(), Self::default(), Self::default());
        containers.for_each(|requests| running.add(&Self::of(&requests)));
        for (sidecar, requests) in init {
            let mut needed = Self::of(&requests);
            needed.add(&sidecars);
            if sidecar {
                sidecars = needed;
            } else {
                needed.each(|name, count| largest.change(name, |most| most.max(count)));
            }
        }
        running.add(&sidecars);
        largest.each(|name, count| running.change(name, |most| most.max(count)));
        Self::of(whole).each(|name, count| running.change(name, |_| count));
        running.add(&Self::of(overhead));
        Self { pods: 1, ..running }
    }

    pub fn add(&mut self, other: &Self) {
        other.each(|name, count| self.change(name, |sum| sum.saturating_add(count)));
    }

    /// Whether a node that has `allocatable`, with `used` taken, has this much left of all that is asked for.
    #[must_use]
    pub fn fits(&self, used: &Self, allocatable: &Self) -> bool {
        let mut fits = true;
        self.each(|name, count| fits &= count.saturating_add(used.get(name)) <= allocatable.get(name));
        fits
    }

    fn get(&self, name: &str) -> i64 {
        match name {
            "cpu" => self.cpu,
            "memory" => self.memory,
            "pods" => self.pods,
            other => self.others.get(other).copied().unwrap_or(0),
        }
    }

    fn change(&mut self, name: &str, change: impl FnOnce(i64) -> i64) {
        let count = change(self.get(name));
        match name {
            "cpu" => self.cpu = count,
            "memory" => self.memory = count,
            "pods" => self.pods = count,
            other if count != 0 => drop(self.others.insert(other.to_owned(), count)),
            other => drop(self.others.remove(other)),
        }
    }

    /// Resources of which there is none are left out.
    fn each(&self, mut see: impl FnMut(&str, i64)) {
        let common = [("cpu", self.cpu), ("memory", self.memory), ("pods", self.pods)];
        let others = self.others.iter().map(|(name, count)| (name.as_str(), *count));
        common.into_iter().chain(others).filter(|(_, count)| *count != 0).for_each(|(name, count)| see(name, count));
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn list(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), (*count).to_owned())).collect()
    }

    fn amount(pairs: &[(&str, &str)]) -> Amount {
        Amount::of(&list(pairs))
    }

    #[rstest]
    #[case::gpu(&[("nvidia.com/gpu", "1")])]
    #[case::scratch_space(&[("ephemeral-storage", "20Gi")])]
    #[case::huge_pages(&[("hugepages-2Mi", "64Mi")])]
    fn a_node_must_have_everything_that_is_asked_for(#[case] asked: &[(&str, &str)]) {
        let plain = amount(&[("cpu", "8"), ("memory", "32Gi"), ("pods", "110"), ("ephemeral-storage", "10Gi")]);
        let mut special = plain.clone();
        special.add(&amount(asked));
        special.add(&amount(&[("ephemeral-storage", "20Gi")]));
        let asked = amount(asked);
        assert!(!asked.fits(&Amount::default(), &plain));
        assert!(asked.fits(&Amount::default(), &special));
        assert!(!asked.fits(&special, &special), "all of it is taken");
    }

    #[test]
    fn what_a_pod_does_not_ask_for_may_be_overcommitted() {
        let (small, taken) = (amount(&[("memory", "1Gi"), ("cpu", "1")]), amount(&[("cpu", "2")]));
        assert!(amount(&[("memory", "1Gi")]).fits(&taken, &small));
    }

    #[test]
    fn a_pod_asks_for_containers_and_sidecars_or_an_init_container_beside_the_sidecars_before_it() {
        let cpu = |count: &str| list(&[("cpu", count)]);
        let none = Labels::new();
        let of = |init: Vec<(bool, Labels)>| {
            Amount::of_pod([cpu("1"), cpu("500m")].into_iter(), init.into_iter(), &none, &none).cpu
        };
        assert_eq!(of(vec![(true, cpu("250m")), (false, cpu("1400m"))]), 1750);
        assert_eq!(of(vec![(true, cpu("250m")), (false, cpu("1600m"))]), 1850);
        assert_eq!(of(vec![(false, cpu("1600m")), (true, cpu("250m"))]), 1750);
    }

    #[test]
    fn what_is_asked_for_the_whole_pod_replaces_its_parts_and_overhead_comes_on_top() {
        let part = list(&[("cpu", "1"), ("memory", "1Gi"), ("nvidia.com/gpu", "1")]);
        let pod = Amount::of_pod([part].into_iter(), [].into_iter(), &list(&[("cpu", "3")]), &list(&[("cpu", "50m")]));
        assert_eq!(pod, amount(&[("cpu", "3050m"), ("memory", "1Gi"), ("nvidia.com/gpu", "1"), ("pods", "1")]));
    }
}
