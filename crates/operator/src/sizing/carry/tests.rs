use groundcrew_core::sizing::status::Tally;
use groundcrew_core::sizing::{Raw, Template};

use super::*;

fn facts(status: TemplateStatus) -> TemplateFacts {
    TemplateFacts { uid: "t".to_owned(), generation: Some(3), template: Template::read(&Raw::default()), status }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

#[test]
fn a_status_that_says_the_same_is_the_same_and_keeps_its_times() {
    let template = facts(TemplateStatus::default());
    let summary = Tally::default().summary(&template.template);
    let first = status(&template, &summary, at(1000));
    assert_eq!(first.observed_generation, Some(3));
    let times: Vec<_> = first.conditions.iter().map(|c| (c.type_.as_str(), c.last_transition_time.0)).collect();
    assert_eq!(times, [("Ready", at(1000)), ("ResizePending", at(1000))]);
    let over_the_wire: TemplateStatus = serde_json::from_value(json!(first)).unwrap();
    assert_eq!(status(&facts(over_the_wire), &summary, at(2000)), first, "no write");
}

#[test]
fn a_condition_that_turns_gets_a_new_time() {
    let template = facts(TemplateStatus::default());
    let broken = Tally::default().summary(&template.template);
    let before = facts(status(&template, &broken, at(1000)));
    let percent = groundcrew_core::sizing::PerResource { cpu: 1, memory: 1, storage: 1 };
    let mended = Tally::default().summary(&Template::read(&Raw { percent, ..Raw::default() }));
    let after = status(&before, &mended, at(2000));
    let times: Vec<_> = after.conditions.iter().map(|c| (c.status.as_str(), c.last_transition_time.0)).collect();
    assert_eq!(times, [("True", at(2000)), ("False", at(1000))]);
}

#[tokio::test(start_paused = true)]
async fn the_pace_is_kept_within_each_second() {
    let mut pace = Pace::new(20);
    assert_eq!(pace.allows(Instant::now()), 20);
    pace.take(15);
    tokio::time::advance(Duration::from_millis(500)).await;
    assert_eq!(pace.allows(Instant::now()), 5);
    pace.take(5);
    assert_eq!(pace.allows(Instant::now()), 0);
    tokio::time::advance(Duration::from_millis(500)).await;
    assert_eq!(pace.allows(Instant::now()), 20);
}

#[test]
fn a_replica_that_leads_no_more_exports_no_numbers() {
    let exported = |registry: &Registry| {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        text
    };
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let failures = BTreeMap::from([(key("ns", "x"), groundcrew_core::sizing::Why::NodeOpen)]);
    metrics.record(&Plan { states: BTreeMap::from([("right", 7)]), failures, ..Plan::default() });
    assert!(exported(&registry).contains("groundcrew_sizing_pods{state=\"right\"} 7"));
    assert!(exported(&registry).contains("groundcrew_sizing_failing_daemonsets 1"));
    metrics.clear();
    assert!(!exported(&registry).contains("groundcrew_sizing_pods{"));
    assert!(exported(&registry).contains("groundcrew_sizing_failing_daemonsets 0"));
}
