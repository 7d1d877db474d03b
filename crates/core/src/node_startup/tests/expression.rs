use rstest::rstest;

use super::*;
use crate::node_startup::expression::{Expression, Failed, Invalid, MAX_LENGTH};

fn holds(text: &str, pods: &[DaemonPod]) -> Result<bool, Failed> {
    let node = node("n").label("pool", "gpu").condition("GPUReady", "True").annotate("driver", "535");
    let seen = Seen { node: &node, daemon_sets: &[], pods, user_pods: false };
    Expression::compile(text).unwrap().holds(&seen)
}

#[rstest]
#[case("node.name == 'n'", true)]
#[case("node.labels['pool'] == 'gpu'", true)]
#[case("node.labels.pool != 'gpu'", false)]
#[case("'missing' in node.labels", false)]
#[case("has(node.labels.pool) && node.conditions['GPUReady'] == 'True'", true)]
#[case("int(node.annotations['driver']) >= 535", true)]
#[case("node.taints.exists(t, t.key == 'startup.k8s.io/initializing')", true)]
#[case("pods.size() == 2 && pods.exists(p, p.ready && p.daemonSet == 'cni')", true)]
#[case("pods.all(p, p.ready || p.annotated)", false)]
#[case("node.name.matches('^n[0-9]*$')", true)]
fn expressions_see_the_node_and_its_daemon_pods(#[case] text: &str, #[case] expected: bool) {
    assert_eq!(holds(text, &[pod("agent"), pod("cni").ready()]), Ok(expected));
}

#[test]
fn a_leftover_pod_is_not_ready_to_an_expression() {
    let leftover = DaemonPod { created: at(-5), ..pod("agent").ready() };
    assert_eq!(holds("pods.exists(p, p.ready)", &[leftover]), Ok(false));
}

#[rstest]
#[case("node.name")]
#[case("1 + 1")]
fn an_answer_that_is_no_boolean_is_no_answer(#[case] text: &str) {
    assert_eq!(holds(text, &[]), Err(Failed::NotBoolean));
}

#[rstest]
#[case("node.labels['none'] == 'x'")]
#[case("1 / 0 == 1")]
#[case("node.nothing")]
fn a_failed_evaluation_says_so(#[case] text: &str) {
    assert!(matches!(holds(text, &[]), Err(Failed::Evaluation(_))));
}

#[rstest]
#[case("node.name ==", "the expression does not parse")]
#[case("", "the expression does not parse")]
#[case("nodes.name == 'n'", "the expression uses \"nodes\"")]
#[case("pods.all(p, q.ready)", "the expression uses \"q\"")]
#[case("pods.all(a, pods.all(b, pods.all(c, a.ready && b.ready && c.ready)))", "more than 2 loops")]
fn a_bad_expression_is_refused_when_it_is_read(#[case] text: &str, #[case] reason: &str) {
    let error = Expression::compile(text).unwrap_err().to_string();
    assert!(error.contains(reason), "{error}");
}

#[test]
fn a_text_that_is_too_long_is_not_even_read() {
    assert_eq!(Expression::compile(&"1".repeat(MAX_LENGTH + 1)).unwrap_err(), Invalid::Long);
}

#[rstest]
#[case("(".repeat(1024))]
#[case("[".repeat(1024))]
#[case(format!("{}true{}", "(".repeat(500), ")".repeat(500)))]
#[case(format!("{}1{} == [1]", "[".repeat(80), "]".repeat(80)))]
#[case(format!("{} == 1", ["1"; 300].join("+")))]
#[case(format!("node{}", "[0]".repeat(300)))]
#[case(format!("node{}", ".a".repeat(500)))]
#[case(format!("{}1{} == 1", "size(".repeat(90), ")".repeat(90)))]
#[case("!".repeat(1024))]
fn a_deep_text_is_refused_and_no_stack_overflows(#[case] text: String) {
    assert!(Expression::compile(&text).is_err());
}

#[test]
fn the_deepest_expression_allowed_fits_half_a_default_stack() {
    let text = format!("{} == 22", ["1"; 22].join(" + "));
    let deepest = Expression::compile(&text).unwrap();
    assert_eq!(Expression::compile(&format!("{} == 25", ["1"; 25].join(" + "))).unwrap_err(), Invalid::Deep);
    let evaluate = move || {
        let node = node("n");
        let seen = Seen { node: &node, daemon_sets: &[], pods: &[], user_pods: false };
        deepest.holds(&seen)
    };
    let small = std::thread::Builder::new().stack_size(1 << 20).spawn(evaluate).unwrap();
    assert_eq!(small.join().unwrap(), Ok(true));
}

#[test]
fn expressions_can_be_shared_between_tasks() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Expression>();
}

proptest::proptest! {
    #[test]
    fn no_text_makes_the_compiler_panic(text in "[a-z0-9.()\\[\\]{}'\"!&|=<>+*/?: -]{0,60}") {
        let _ = Expression::compile(&text);
    }
}
