use futures::{StreamExt, stream};
use groundcrew_core::quantity::{self, Invalid};
use groundcrew_testbed::Layer;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Error;

use super::*;

/// Small and the same on every machine.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        usize::try_from(self.roll(from.len() as u64)).ok().and_then(|at| from.get(at).copied()).unwrap_or("")
    }

    fn digits(&mut self, most: u64) -> String {
        let count = self.roll(most + 1);
        (0..count).map(|_| char::from(b'0' + u8::try_from(self.roll(10)).unwrap_or(0))).collect()
    }

    fn quantity(&mut self) -> String {
        let sign = self.pick(&["", "", "", "+", "-"]);
        let whole = if self.roll(4) == 0 { self.digits(20) } else { self.digits(4) };
        let zeros = self.pick(&["", "", "000", "00"]);
        let fraction = if self.roll(2) == 0 { format!(".{}", self.digits(12)) } else { String::new() };
        let unit = match self.roll(10) {
            0 => self.pick(&["K", "ki", "e", "i", "Kk", "_", "Zi", "e+", "mm", "x"]).to_owned(),
            1 | 2 => format!("{}{}{}", self.pick(&["e", "E"]), self.pick(&["", "+", "-"]), self.roll(13)),
            _ => self
                .pick(&["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])
                .to_owned(),
        };
        format!("{sign}{whole}{zeros}{fraction}{unit}")
    }
}

/// What the API server says: the canonical form, that it is negative, or nothing at all.
#[derive(Debug, PartialEq)]
enum Said {
    Printed(String),
    Negative(String),
    Refused,
}

async fn ask(api: &Api<CSIStorageCapacity>, text: &str) -> anyhow::Result<Said> {
    let mut object = CSIStorageCapacity { storage_class_name: "none".to_owned(), ..CSIStorageCapacity::default() };
    object.metadata.generate_name = Some("q-".to_owned());
    object.capacity = Some(Quantity(text.to_owned()));
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    match api.create(&dry, &object).await {
        Ok(stored) => Ok(Said::Printed(stored.capacity.map(|quantity| quantity.0).unwrap_or_default())),
        Err(Error::Api(status)) if status.code == 422 => Ok(Said::Negative(status.message.clone())),
        Err(Error::Api(status)) if status.code == 400 => Ok(Said::Refused),
        Err(error) => Err(error.into()),
    }
}

fn agrees(text: &str, said: &Said) -> bool {
    match (quantity::parse(text), said) {
        (Err(_), Said::Refused) => true,
        (Ok(ours), Said::Printed(theirs)) => {
            // The server repeats some spellings as they came; what it prints itself must be our form.
            let repeated = theirs == text;
            let same = quantity::parse(theirs).is_ok_and(|theirs| theirs == ours);
            same && (repeated || *theirs == ours.to_string())
        }
        (Ok(ours), Said::Negative(message)) => {
            ours.to_string().starts_with('-')
                && (message.contains(&format!("{:?}", ours.to_string())) || message.contains(&format!("{text:?}")))
        }
        _ => false,
    }
}

/// Where the API server itself prints nonsense, and where we stop counting.
fn beyond(text: &str) -> bool {
    match quantity::parse(text) {
        Err(why) => why == Invalid::Digits,
        Ok(ours) => ours.to_string().contains("e2") || ours.to_string().contains("e3"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_quantities_mean_the_same_to_us_and_to_the_api_server() -> anyhow::Result<()> {
    let cluster = Cluster::start(Layer::Api).await?;
    let namespace = cluster.namespace("quantities").await?;
    let api: Api<CSIStorageCapacity> = namespace.api();
    let mut dice = Dice(2026);
    let mut texts: Vec<String> = (0..3000).map(|_| dice.quantity()).filter(|text| !text.is_empty()).collect();
    let special = ["+", "-", ".", "k", "Ki", "Pi", "e-9", "e-10", "1E", "1Ei", "1e", ".5", "5.", "0x1", "--1", "1_000"];
    texts.extend(special.map(str::to_owned));
    texts.retain(|text| !beyond(text));
    assert!(texts.len() > 2500);
    let api = &api;
    let answers = stream::iter(&texts).map(|text| async move { Ok::<_, anyhow::Error>((text, ask(api, text).await?)) });
    let answers: Vec<_> = answers.buffer_unordered(8).collect().await;
    let mut legal = 0;
    let mut wrong = Vec::new();
    for answer in answers {
        let (text, said) = answer?;
        legal += usize::from(said != Said::Refused);
        if !agrees(text, &said) {
            wrong.push(format!("{text:?}: ours {:?}, theirs {said:?}", quantity::parse(text).map(|q| q.to_string())));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(legal > 2000 && legal < texts.len(), "{legal} of {} are legal", texts.len());
    Ok(())
}
