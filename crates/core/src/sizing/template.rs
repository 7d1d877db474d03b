//! The template as users write it, read once into exact numbers.

use std::fmt;

use serde::Serialize;

use crate::keys::Lookup;
use crate::quantity;

/// What a template sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Resource {
    Cpu,
    Memory,
    Storage,
}

impl Resource {
    pub const ALL: [Resource; 3] = [Resource::Cpu, Resource::Memory, Resource::Storage];

    /// Its name in requests, limits and a node's allocatable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Resource::Cpu => "cpu",
            Resource::Memory => "memory",
            Resource::Storage => "ephemeral-storage",
        }
    }

    /// Its percentage, minimum and maximum in a template.
    const fn fields(self) -> [&'static str; 3] {
        match self {
            Resource::Cpu => ["cpuPercentage", "minCPU", "maxCPU"],
            Resource::Memory => ["memoryPercentage", "minMemory", "maxMemory"],
            Resource::Storage => ["storagePercentage", "minStorage", "maxStorage"],
        }
    }

    /// Millicores or bytes, rounded up as the API server rounds them.
    pub fn amount(self, text: &str) -> Result<u64, String> {
        let quantity = quantity::parse(text).map_err(|why| why.to_string())?;
        let number = if self == Resource::Cpu { quantity.millis() } else { quantity.units() };
        let number = number.ok_or_else(|| "too large".to_owned())?;
        u64::try_from(number).map_err(|_| "must not be negative".to_owned())
    }

    /// The amount as the API server writes it.
    #[must_use]
    pub fn text(self, amount: u64) -> String {
        match self {
            Resource::Cpu => quantity::Quantity::from_millis(amount).to_string(),
            Resource::Memory | Resource::Storage => quantity::Quantity::from_bytes(amount).to_string(),
        }
    }
}

/// One value for each resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PerResource<T> {
    pub cpu: T,
    pub memory: T,
    pub storage: T,
}

/// Millicores and bytes; absent where nothing is said.
pub type Amounts = PerResource<Option<u64>>;

impl<T> PerResource<T> {
    pub fn get(&self, resource: Resource) -> &T {
        match resource {
            Resource::Cpu => &self.cpu,
            Resource::Memory => &self.memory,
            Resource::Storage => &self.storage,
        }
    }

    pub fn set(&mut self, resource: Resource, value: T) {
        match resource {
            Resource::Cpu => self.cpu = value,
            Resource::Memory => self.memory = value,
            Resource::Storage => self.storage = value,
        }
    }

    pub fn try_map<E>(make: impl Fn(Resource) -> Result<T, E>) -> Result<Self, E> {
        Ok(Self { cpu: make(Resource::Cpu)?, memory: make(Resource::Memory)?, storage: make(Resource::Storage)? })
    }
}

impl Amounts {
    #[must_use]
    pub fn of(&self, resource: Resource) -> Option<u64> {
        *self.get(resource)
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        Resource::ALL.iter().all(|resource| self.of(*resource).is_none())
    }

    /// Without the others.
    #[must_use]
    pub fn only(mut self, keep: impl Fn(Resource) -> bool) -> Self {
        for resource in Resource::ALL.into_iter().filter(|resource| !keep(*resource)) {
            self.set(resource, None);
        }
        self
    }

    /// The readable ones of a container; the API server has refused all others.
    pub fn declared(map: &impl Lookup) -> Self {
        let read = |resource: Resource| map.value(resource.name()).and_then(|text| resource.amount(text).ok());
        Self { cpu: read(Resource::Cpu), memory: read(Resource::Memory), storage: read(Resource::Storage) }
    }

    /// What a node has to give.
    pub fn allocatable(map: &impl Lookup) -> Result<Self, Problem> {
        PerResource::try_map(|resource| {
            let Some(text) = map.value(resource.name()) else { return Ok(None) };
            resource.amount(text).map(Some).map_err(|why| Problem::quantity(resource.name(), text, &why))
        })
    }
}

impl fmt::Display for Amounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        for resource in Resource::ALL {
            if let Some(amount) = self.of(resource) {
                write!(f, "{comma}{} {}", resource.name(), resource.text(amount))?;
                comma = ", ";
            }
        }
        Ok(())
    }
}

/// What one resource's size is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Share {
    pub percent: u8,
    pub min: Option<u64>,
    pub max: Option<u64>,
}

/// Whom the size is meant for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum Distribution {
    /// The pod: its containers share it.
    #[default]
    Pod,
    /// Every container by itself.
    PerContainer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Template {
    pub shares: PerResource<Share>,
    pub distribution: Distribution,
}

/// A template as it came over the wire.
#[derive(Clone, Copy, Debug, Default)]
pub struct Raw<'a> {
    pub percent: PerResource<i64>,
    pub min: PerResource<Option<&'a str>>,
    pub max: PerResource<Option<&'a str>>,
    pub distribution: Distribution,
}

/// What is wrong with a template or a node, naming the field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{0}")]
pub struct Problem(String);

impl Problem {
    fn quantity(field: &str, text: &str, why: &str) -> Self {
        Self(format!("invalid {field} value {text:?}: {why}"))
    }
}

impl Template {
    /// The schema refuses what is wrong here; objects older than the schema still come this way.
    pub fn read(raw: &Raw<'_>) -> Result<Self, Problem> {
        let shares = PerResource::try_map(|resource| share(resource, raw))?;
        Ok(Self { shares, distribution: raw.distribution })
    }
}

fn share(resource: Resource, raw: &Raw<'_>) -> Result<Share, Problem> {
    let [percentage, min_field, max_field] = resource.fields();
    let percent = *raw.percent.get(resource);
    let bound = |field: &str, text: Option<&str>| {
        let read = |text| resource.amount(text).map_err(|why| Problem::quantity(field, text, &why));
        text.filter(|text| !text.is_empty()).map(read).transpose()
    };
    let min = bound(min_field, *raw.min.get(resource))?;
    let max = bound(max_field, *raw.max.get(resource))?;
    if max == Some(0) {
        return Err(Problem(format!("{max_field} must be above 0")));
    }
    if let (Some(min), Some(max)) = (min, max)
        && min > max
    {
        let (min, max) = (resource.text(min), resource.text(max));
        return Err(Problem(format!("{min_field} {min} is above {max_field} {max}")));
    }
    match u8::try_from(percent) {
        Ok(percent @ 1..=100) => Ok(Share { percent, min, max }),
        _ => Err(Problem(format!("{percentage} must be between 1 and 100, got {percent}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rstest::rstest;

    use super::*;

    fn raw() -> Raw<'static> {
        Raw { percent: PerResource { cpu: 10, memory: 15, storage: 5 }, ..Raw::default() }
    }

    #[test]
    fn bounds_are_counted_in_millicores_and_bytes() {
        let min = PerResource { cpu: Some("100m"), memory: Some("128Mi"), storage: None };
        let max = PerResource { cpu: Some("2"), memory: None, storage: Some("") };
        let template = Template::read(&Raw { min, max, ..raw() }).unwrap();
        assert_eq!(template.shares.cpu, Share { percent: 10, min: Some(100), max: Some(2000) });
        assert_eq!(template.shares.memory, Share { percent: 15, min: Some(128 << 20), max: None });
        assert_eq!(template.shares.storage, Share { percent: 5, min: None, max: None });
    }

    #[rstest]
    #[case("abc", "", "invalid minCPU value \"abc\": unknown unit")]
    #[case("-1", "", "invalid minCPU value \"-1\": must not be negative")]
    #[case("1e400", "", "invalid minCPU value \"1e400\": too large")]
    #[case("1000000000000000000000000000000", "", "too large")]
    #[case("", "abc", "invalid maxCPU value \"abc\"")]
    #[case("", "0", "maxCPU must be above 0")]
    #[case("2", "1500m", "minCPU 2 is above maxCPU 1500m")]
    fn a_bad_bound_is_named(#[case] min: &str, #[case] max: &str, #[case] message: &str) {
        let only_cpu = |text| PerResource { cpu: Some(text), memory: None, storage: None };
        let problem = Template::read(&Raw { min: only_cpu(min), max: only_cpu(max), ..raw() }).unwrap_err();
        assert!(problem.to_string().contains(message), "{problem}");
    }

    #[rstest]
    #[case(0)]
    #[case(101)]
    #[case(-1)]
    #[case(356)]
    fn a_percentage_outside_its_range_is_named(#[case] percent: i64) {
        let percent = PerResource { memory: percent, ..raw().percent };
        let problem = Template::read(&Raw { percent, ..raw() }).unwrap_err().to_string();
        assert_eq!(problem, format!("memoryPercentage must be between 1 and 100, got {}", percent.memory));
    }

    #[test]
    fn a_node_that_cannot_be_read_says_which_resource() {
        let map =
            |text: &str| BTreeMap::from([("cpu".to_owned(), "4".to_owned()), ("memory".to_owned(), text.to_owned())]);
        let read = Amounts::allocatable(&map("16Gi")).unwrap();
        assert_eq!(read, Amounts { cpu: Some(4000), memory: Some(16 << 30), storage: None });
        let problem = Amounts::allocatable(&map("-1")).unwrap_err().to_string();
        assert_eq!(problem, "invalid memory value \"-1\": must not be negative");
    }
}
