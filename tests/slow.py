"""Names the tests that `make test` leaves to `make test-all`, and the cases of each that it keeps.

By file and test, the ids of the cases that `make test` runs, the hardest small ones: all others are
marked slow. `*` stands for anything in an id. Collecting a file checks what is named of it.
"""

import re

SLOW = {
    "test_parity.py": {
        "test_every_layout_is_the_one_rank_run": (
            "llama documents: world=8 tp=4 cp=2 *",
            "llama dropout: world=4 tp=2 pp=2 *",
            "llama: world=4 tp=2 pp=2 *",
            "gpt deep: world=4 pp=4 vpp=2 *",
            "gpt dropout: world=2 cp=2 cp_mode=all_gather",
            "llama: world=2 cp=2 cp_mode=a2a *",
            "gpt dropout: world=2 zero=3",
            "one key head: world=4 tp=4 *",
            "moe early: world=4 *",
            "moe capped: world=4 * zero=3 *",
            "moe biased: world=2 cp=2 ep=2",
            "moe lamb: world=4 *",
        ),
        "test_any_legal_layout_of_four_or_eight_ranks_has_the_one_rank_gradients": (),
    },
    "test_docs.py": {
        "test_a_page_s_commands_do_what_it_says": (
            "README.md", "checkpoints.md", "data.md", "eval.md", "experts.md", "generate.md",
            "preprocess.md", "shard.md",
        ),
    },
    "test_bench_gpu.py": {
        "test_a_pair_is_measured_in_processes_of_their_own_and_kept": (),
        "test_without_a_gpu_each_script_says_so_and_ends_with_2": (),
    },
    "test_bench_kernels.py": {
        "test_every_kernel_compiles_for_a_gpu_that_is_not_there": (),
        "test_without_a_gpu_the_benchmark_says_so_in_one_line": (),
    },
    # commands
    "test_eval.py": {
        "test_the_real_files_have_the_numbers_of_transformers": ("gpt2",),
        "test_every_rank_of_any_layout_has_the_same_answers": ("*-tp=2 pp=2",),
    },
    "test_faults.py": {
        "test_a_damaged_newest_checkpoint": ("flipped",),
        "test_a_rank_killed_in_a_save": ("commit-*",),
    },
    "test_listening.py": {
        "test_ranks_of_several_machines_listen_on_the_interface_of_the_master_alone": (),
    },
    "test_run_folder.py": {
        "test_a_run_that_is_started_again_by_its_launcher_takes_its_own_lock_over": (),
    },
    "test_stalls.py": {
        "test_a_rank_that_leaves_without_a_word_is_named": (),
        "test_a_rank_that_is_stopped_is_named_as_one_that_does_not_answer": (),
        "test_a_rank_whose_store_has_stopped_still_ends": (),
    },
    "test_train.py": {
        "test_a_signal_saves_and_ends_with_130": ("ctrl-c with workers",),
        "test_an_id_that_the_vocabulary_lacks_ends_all_ranks_with_its_place": ("train",),
        "test_slurm_tasks_find_each_other": (),
        "test_torchrun_starts_it_and_bf16_keeps_float32_masters": (),
    },
    # core
    "test_aux_losses.py": {
        "test_gradients_are_those_of_the_formulas": ("4-*", "2-{'pp': 2*"),
    },
    "test_measure_cpu.py": {"test_two_ranks_measure_every_number_of_a_mixture": ()},
    "test_compiling.py": {
        "test_compiled_blocks_give_the_losses_of_those_as_written": (
            "tp of one key-value head", "ep and zero=3",
        ),
        "test_generated_code_gives_the_same_losses_and_one_graph_serves_every_block": (),
    },
    "test_to_mtcli.py": {"test_any_layout_to_any_other_and_back_is_bit_exact": ("moe",)},
    "test_context.py": {
        "test_values_and_every_gradient_are_those_of_the_whole": ("4-*", "2-a2a-full-rows"),
        "test_flash_kernels_have_the_values_and_gradients_of_the_whole": ("all_gather-True",),
        "test_a_ring_of_8192_tokens_is_torch_s_attention": ("documents-causal",),
    },
    "test_tokenizer_limits.py": {
        "test_a_definition_that_grows_or_panics_is_an_error": (
            "replace", "nested", "charsmap", "bytes", "template", "pattern", "all growth",
        ),
    },
    "test_dry_run.py": {
        "test_a_rank_holds_the_state_of_the_plan_to_the_byte_and_its_peak_within_5_percent": (
            "one rank", "zero=3 and no data ranks", "dropout", "tp", "interleaved",
            "a shared expert, folded", "experts in float8", "capacity of whole sequences",
            "zero=3, experts", "documents", "lamb, zero=3", "zero=3 in a pipeline",
            "a key head of ranks round a ring",
            "copies of weights on CPU", "documents round a ring on CPU", "bfloat16 in float32",
        ),
    },
    "test_inference_model.py": {
        "test_mixtures_score_as_transformers_wherever_their_experts_are": (
            "4-['tp=2', 'ep=2', 'etp=2']-3", "4-['tp=2', 'ep=4', 'dispatcher=all_gather']-3",
        ),
    },
    "test_fp16_layouts.py": {
        "test_a_layout_has_float64_s_gradients_to_rounding_and_one_rank_s_loss_scales": (
            "('llama', 4,*", "('moe', 4, {'tp': 2*", "('gpt', 2, {'zero': 3}*",
        ),
        "test_a_run_goes_on_with_its_loss_scale_and_updates_on_any_layout": ("2-{'cp': 2*",),
    },
    "test_generate.py": {
        "test_every_rank_of_any_layout_says_the_same": ("*-['tp=2', 'pp=2']", "llama-['tp=4']"),
    },
    "test_generate_families.py": {
        "test_text_ends_where_either_file_says": ("gpt2", "qwen2_moe"),
    },
    "test_idle_experts.py": {
        "test_what_no_token_meets_has_zero_gradients_on_every_layout": (
            "4-{'tp': 2*", "4-{'ep': 2, 'zero': 3}-{}-all_to_all",
        ),
    },
    "test_lamb_runs.py": {
        "test_a_run_goes_on_with_the_same_curve_on_any_layout": ("gpt-bf16*", "moe-fp64*"),
    },
    "test_limits.py": {
        "test_a_line_of_600_mb_takes_less_than_300": ("a.jsonl.zst", "-"),
        "test_what_is_told_of_reading_is_the_size_of_the_file_in_steps": ("", ".zst"),
    },
    "test_suggest.py": {
        "test_the_nearest_are_the_best_of_trying_every_layout": ("*-8",),
    },
    "test_published.py": {
        "test_steps_that_were_not_fitted_on_are_predicted_within_some_per_cent": (
            "korthikanti*", "llama*", "deep_ep*", "torchtitan*",
        ),
    },
    "test_consumed_samples.py": {
        "test_a_run_made_longer_across_an_epoch_keeps_its_samples": ("False",),
    },
    "test_save.py": {
        "test_training_goes_on_while_the_bytes_of_a_synchronous_save_are_written": ("*'zero': 3*",),
    },
    "test_state.py": {
        "test_any_layout_goes_on_with_the_same_curve": ("llama-(4*",),
        "test_saving_without_a_step_between_changes_no_bit": ("gpt-(4*",),
        "test_a_wider_precision_between_loses_nothing_of_a_narrow_run": ("*zero*", "(1, {}, {})-*"),
        "test_biases_of_experts_go_on_on_any_layout": ("(4,*",),
    },
    "test_state_bytes.py": {
        "test_the_planned_state_bytes_are_those_that_the_fullest_rank_allocates": (
            "one rank, masters", "zero=1 of experts", "zero=3, odd rows", "folded", "lamb*",
        ),
    },
    "test_training_upcycled.py": {
        "test_a_run_starts_at_the_dense_loss_falls_and_is_the_same_on_every_layout": ("slices",),
    },
    "test_watchdog.py": {
        "test_a_rank_that_another_waits_for_is_named": ("tensor-*", "message-*"),
    },
}  # fmt: skip


def is_kept(case: str, ids: tuple[str, ...]) -> bool:
    """Whether a case of a test is one of those that `make test` keeps."""
    return any(re.fullmatch(re.escape(one).replace(r"\*", ".*"), case) for one in ids)
