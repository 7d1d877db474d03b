//! The fuzz targets without a fuzzer: every seed, and many mutations of them, the same in each run.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

#[path = "../../../fuzz/src/lib.rs"]
mod targets;

const ROUNDS: usize = 100_000;

/// Pieces that parsers stumble over.
const TOKENS: [&str; 20] = [
    "/", "//", ":", "@", "#", "?", "%", "%2F", "%40", "%0a", "\\", "\r\n", "\t", " ", "http:", "\u{0}", "\u{85}", "ß",
    "{{x}}", "..",
];

fn seeds(target: &str) -> Vec<String> {
    // Relative to the package: a build that clones share may have been compiled in another one.
    let directory = format!("../../fuzz/seeds/{target}");
    let mut paths: Vec<_> = std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit.max(1)
    }
}

/// One small change at a random place.
fn mutate(text: &str, other: &str, random: &mut Random) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    let at = random.below(chars.len() + 1);
    match random.below(5) {
        0 => drop(chars.splice(at..at, TOKENS[random.below(TOKENS.len())].chars())),
        1 => drop(chars.drain(at.min(chars.len())..(at + random.below(4)).min(chars.len()))),
        2 => chars.truncate(at),
        3 => drop(chars.splice(at.., other.chars().skip(random.below(8)))),
        _ => chars.insert(at, char::from_u32(random.below(0x250) as u32).unwrap_or('x')),
    }
    chars.into_iter().collect()
}

fn run(target: fn(&str), seeds: Vec<String>) {
    seeds.iter().for_each(|seed| target(seed));
    let (mut pool, mut random) = (seeds, Random(42));
    for _ in 0..ROUNDS {
        let (at, other) = (random.below(pool.len()), random.below(pool.len()));
        let text = mutate(&pool[at], &pool[other], &mut random);
        target(&text);
        // Changes add up, and what grows too long to be interesting starts over.
        if text.len() < 64 {
            if pool.len() < 256 { pool.push(text) } else { pool[at] = text }
        }
    }
}

#[test]
fn endpoints_are_paths_on_the_pod() {
    let seeds = seeds("endpoint");
    assert!(seeds.len() >= 16);
    run(targets::endpoint, seeds);
}
