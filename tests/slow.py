"""Names the tests that `make test` leaves to `make test-all`, and the cases of each that it keeps.

By file and test, the ids of the cases that `make test` runs, the hardest small ones: all others are
marked slow. `*` stands for anything in an id. Collecting a file checks what is named of it.
"""

import re

SLOW = {
    "test_parity.py": {
        "test_every_layout_is_the_one_rank_run": (
            "llama documents: world=8 tp=4 cp=2 *", "gpt deep: world=4 pp=4 vpp=2 *",
            "moe capped: world=4 * zero=3 *", "bert dropout: world=4 tp=4 tp_mode=2d *",
        ),
        "test_any_legal_layout_of_four_or_eight_ranks_has_the_one_rank_gradients": (),
    },
    "test_docs.py": {
        "test_a_page_s_commands_do_what_it_says": ("generate.md",),
    },
    "test_untrusted.py": {
        "test_a_pickle_in_the_place_of_a_file_does_nothing": (
            "tiny.idx-*", "run/checkpoints/step-00000001/manifest.json-*", "hf/tokenizer.json-*",
        ),
        "test_no_pipe_or_device_in_the_place_of_a_file_is_waited_for": (
            "tiny.tokenizer/tokenizer.json-*", "run/run.json-*", "wiki.test.tokens-*",
        ),
    },
    "test_bert_runs.py": {
        "test_a_head_for_race_learns_its_questions_and_answers_alike_on_any_layout": (),
        "test_an_encoder_s_evaluation_goes_on_over_data_ranks": (),
        "test_an_encoder_s_evaluation_that_was_ended_goes_on_where_it_was": ("classifier",),
        "test_an_ensemble_is_of_classifiers_of_one_kind": (),
        "test_an_item_that_an_ended_run_left_damaged_is_computed_again": ("ensemble-*",),
        "test_every_row_of_masked_tokens_is_an_item_and_two_encoders_are_compared_by_theirs": (),
        "test_seeds_of_a_head_are_swept_at_once_and_each_is_a_run_alone": (),
    },
    "test_curate.py": {
        "test_the_memory_that_is_said_beforehand_is_enough_and_not_twice_as_much": (),
        "test_a_run_killed_ten_times_and_resumed_writes_the_same_bytes": (),
    },
    "test_bench_growth.py": {
        "test_a_rank_s_opens_messages_and_requests_are_few": ("128",),
    },
    "test_bench_gpu.py": {
        "test_a_pair_is_measured_in_processes_of_their_own_and_kept": (),
        "test_the_whole_runs_on_a_cpu_and_what_it_chose_is_shipped_and_read": (),
        "test_without_a_gpu_each_script_says_so_and_ends_with_2": (),
    },
    "test_browser.py": {"test_a_run_is_drawn_on_a_dark_and_narrow_screen": ()},
    "test_budgets.py": {
        "test_a_kernel_keeps_its_budget": (
            "sm_90 bf16 flash 128 *", "sm_90 bf16 layer_norm 4096 *",
            "sm_90 bf16 cross_entropy_padded 50257 *", "sm_90 fp32 route 128x8 *",
            "sm_90 bf16 grouped_linear 128x2048*", "sm_90 bf16 lamb *",
        ),
    },
    "test_bench_kernels.py": {
        "test_a_kernel_that_cannot_be_compiled_is_named_and_does_not_keep_others_from_it": (),
        "test_every_entry_of_the_benchmark_gives_the_first_rivals_results_interpreted": (),
        "test_kernels_of_two_architectures_are_compiled_in_one_process": (),
    },
    # sync
    "test_diloco.py": {
        "test_what_compression_loses_is_sent_later": ("4 bits-3", "largest, 2 bits-3"),
        "test_a_replica_that_misses_an_event_rejoins_from_the_outer_weights": ("sync1",),
        "test_gloo_exchanges_the_same_as_shared_memory": ("sync1",),
    },
    "test_diloco_runs.py": {
        "test_another_number_of_replicas_starts_from_the_outer_weights": (),
        "test_a_run_that_changes_to_diloco_starts_from_its_weights": (),
        "test_replicas_of_any_layout_are_one_rank_runs_that_exchange": ("moe ep edp zero 1",),
        "test_a_run_resumed_between_events_and_amid_an_exchange_is_bit_for_bit_the_same": (
            "overlap of bits",
        ),
    },
    "test_arithmetic.py": {
        "test_an_exchange_handles_as_many_elements_of_each_kind_as_are_planned": (
            "signs", "4 bits",
        ),
    },
    "test_sync_diloco.py": {
        "test_planned_bytes_are_those_that_a_run_sends_and_keeps": (
            "4 bits, overlapped", "largest, 2 bits",
        ),
    },
    # select
    "test_proxies.py": {
        "test_proxies_are_the_last_layers_gradients_on_every_layout": (
            "1-*", "2-*tp=2*", "4-*tp_mode=2d*",
        ),
    },
    "test_coreset.py": {
        "test_parts_that_ranks_share_choose_the_same_on_any_number_of_ranks_and_almost_as_well": (),
    },
    "test_select.py": {
        "test_a_run_does_not_go_on_with_another_subset": (),
        "test_two_ranks_choose_what_one_does": ("tp=2",),
        "test_sources_of_a_blend_are_chosen_from_by_their_weights": (),
        "test_training_refuses_a_subset_of_other_sequences": ("*batch.seq_len*", "*'other'*hash"),
        "test_a_run_that_selects_again_has_the_same_losses_resumed_on_two_ranks": (),
    },
    # commands
    "test_lora_commands.py": {
        "test_verify_compares_two_runs_adapters_and_their_optimizer_state": (),
    },
    "test_stragglers.py": {"test_a_rank_that_sleeps_is_named_as_the_straggler": ()},
    "test_eval.py": {
        "test_the_real_files_have_the_numbers_of_transformers": ("gpt2",),
        "test_every_rank_of_any_layout_has_the_same_answers": ("*-tp=2 pp=2",),
        "test_shots_that_are_read_once_change_no_score_on_any_layout": ("tp=2 pp=2", "tp=4 *"),
    },
    "test_faults.py": {
        "test_a_damaged_newest_checkpoint": ("flipped",),
        "test_a_replica_killed_between_exchanges_and_one_or_three_others_that_go_on": ("diloco",),
        "test_a_rank_killed_in_a_save": ("commit-*",),
        "test_a_rank_killed_while_ranks_meet": (),
        "test_a_rank_that_stalls": (),
        "test_a_save_that_takes_longer_than_the_timeout_ends_no_run": (),
    },
    "test_two_agents.py": {
        "test_ranks_that_are_killed_in_turn_meet_again_and_have_the_undisturbed_curve": (),
        "test_a_node_that_leaves_and_joins_again_has_the_undisturbed_curve": (),
        "test_a_second_launch_in_the_folder_of_a_run_is_refused_however_often_it_starts": (),
    },
    "test_cluster_files.py": {
        "test_a_batch_script_trains_on_its_nodes_and_goes_on_when_submitted_again": (),
        "test_the_pods_of_a_manifest_train_together": (),
        "test_a_batch_script_that_forgets_srun_is_refused": (),
    },
    "test_listening.py": {
        "test_ranks_of_one_machine_are_reached_from_it_alone_and_run_nothing_they_are_sent": (),
        "test_a_launcher_that_is_interrupted_prints_no_words_of_torchs": (),
        "test_an_address_that_no_other_machine_can_use_is_refused": ("localhost-*",),
        "test_ranks_of_several_machines_listen_on_the_interface_of_the_master_alone": (),
    },
    "test_plan.py": {
        "test_a_search_that_finds_no_room_says_from_how_many_devices_on_there_is": (),
        "test_a_search_that_finds_no_room_names_a_batch_that_more_layouts_divide": (),
    },
    "test_shard.py": {
        "test_the_result_says_what_memory_it_took": (),
        "test_the_first_tensor_that_differs_is_named_however_many_look_for_it": (),
        "test_verify_says_what_was_compared_of_the_optimizer": (),
    },
    "test_run_folder.py": {
        "test_a_stale_list_of_checkpoints_does_not_mix_them": (),
        "test_beside_a_live_run_that_has_saved_nothing_no_other_starts": ("1",),
        "test_checkpoints_of_one_name_and_other_bytes_are_not_mixed": (),
        "test_rank_0_does_not_begin_behind_a_checkpoint_that_another_sees": ("older",),
        "test_ranks_do_not_evaluate_different_weights_of_one_name": (),
        "test_ranks_do_not_start_from_different_weights_of_one_name": (),
        "test_a_run_that_is_started_again_by_its_launcher_takes_its_own_lock_over": (),
    },
    "test_stalls.py": {
        "test_the_debug_mode_names_the_first_call_that_differs": (),
        "test_ranks_that_wait_for_each_other_are_told_and_how_to_find_out": (),
        "test_our_launcher_says_what_a_rank_found_and_ends_the_one_that_is_stopped": (),
        "test_a_rank_that_leaves_without_a_word_is_named": (),
        "test_a_rank_that_is_stopped_is_named_as_one_that_does_not_answer": (),
        "test_a_rank_whose_store_has_stopped_still_ends": (),
    },
    "test_train.py": {
        "test_a_run_prunes_the_checkpoint_that_it_has_resumed_from": ("1",),
        "test_a_signal_saves_and_ends_with_130": ("ctrl-c with workers",),
        "test_an_id_that_the_vocabulary_lacks_ends_all_ranks_with_its_place": (),
        "test_slurm_tasks_find_each_other": (),
        "test_torchrun_starts_it_and_bf16_keeps_float32_masters": (),
    },
    "test_sweep.py": {
        "test_models_that_fill_a_cpu_core_are_trained_in_turn_unless_asked_otherwise": (),
        "test_a_sweep_that_stops_at_a_step_of_the_median_rule_decides_as_it_would_have": (),
        "test_trials_on_data_ranks_end_early_where_they_do_on_one": (),
        "test_a_sampler_s_sweep_that_resumes_has_all_trials_in_its_table": (),
        "test_a_save_that_fails_leaves_a_sweep_going": ("2",),
        "test_hyperband_stops_the_same_trials_in_one_array_or_in_many": (),
        "test_arrays_over_data_ranks_are_runs_over_data_ranks": (),
        "test_the_median_rule_stops_trials_and_a_run_goes_on_from_there": (),
        "test_seeds_of_shared_batches_are_runs_of_that_order": (),
        "test_json_on_stdout_has_all_trials_and_nothing_else": (),
        "test_a_trial_s_folder_goes_on_with_train_and_is_exported": (),
        "test_adapters_of_a_hugging_face_folder_s_model_are_runs_alone_and_go_on": (),
        "test_sixteen_rates_are_sixteen_runs_and_the_one_that_diverges_is_alone_in_it": (),
    },
    # core
    "test_array.py": {
        "test_a_compiled_model_that_is_not_finite_stays_as_it_was": (),
        "test_compiled_models_of_an_array_are_runs_of_their_own": ("gpt fp64",),
        "test_generated_code_trains_the_models_of_an_array_as_runs_of_their_own": (),
        "test_models_of_an_array_are_runs_of_their_own": (
            "gpt fp64", "llama fp32", "lamb", "dropout", "mixture with a capacity",
            "masked tokens", "masked fp32", "classes",
        ),
        "test_adapters_of_an_array_are_runs_of_their_own_on_one_base": ("llama fp32", "lamb"),
    },
    "test_aux_losses.py": {
        "test_gradients_are_those_of_the_formulas": ("4-*", "2-{'pp': 2*"),
    },
    "test_leaders.py": {
        "test_replicas_of_any_layout_are_workers_trained_one_at_a_time": (
            "lsgd-pp=2", "easgd-zero=1",
        ),
        "test_a_pull_of_1_makes_all_workers_equal_their_leader_and_leaves_that_as_it_was": (
            "bf16",
        ),
        "test_a_run_that_resumes_has_the_bits_of_one_that_was_not_stopped": ("lsgd-bf16",),
        "test_a_run_whose_leader_has_gone_or_that_a_worker_joins_goes_on_from_the_average": (),
        "test_one_worker_per_group_and_one_period_is_a_single_leader": (),
    },
    "test_rounds.py": {
        "test_a_slow_worker_makes_fewer_steps_and_each_part_of_the_data_is_trained_on_once": (
            "3-parallel0",
        ),
        "test_under_a_scripted_clock_workers_do_what_the_script_says": ("lsgd-four workers",),
        "test_workers_of_one_speed_make_the_steps_of_a_synchronous_run_bit_for_bit": ("lsgd-*",),
    },
    "test_sync_leaders.py": {
        "test_planned_bytes_are_those_that_leave": ("lsgd, uneven periods-fp64", "easgd-bf16"),
    },
    "test_bench_train.py": {"test_contenders_have_our_losses": (),},
    "test_console.py": {"test_every_table_of_a_plan_is_as_wide_as_the_terminal_at_most": ("60",)},
    "test_expert_balance.py": {
        "test_a_copy_counts_once_however_often_it_is_computed": ("with losses-2-*",),
        "test_biases_move_by_the_loads_of_the_whole_global_batch": ("8-2-*", "6-4-*"),
    },
    "test_fewest_devices.py": {
        "test_no_smaller_number_of_devices_is_enough": ("gpt2-1.5b-rtx-5000-*",),
    },
    "test_finished_run.py": {"test_the_page_of_a_long_run_is_below_five_megabytes": ()},
    "test_fp8_runs.py": {
        "test_a_layout_trains_as_one_rank_does_up_to_float8_s_rounding": (
            "('moe', 2, {'ep': 2, 'zero': 1}, 'rowwise')", "('blocks', 2, {'tp': 2}, 'blockwise')",
        ),
    },
    "test_gpu_path.py": {
        "test_a_model_of_kernels_has_the_losses_and_gradients_of_torchs_functions": (
            "mixtral of groups",
        ),
    },
    "test_fuse.py": {"test_a_compiled_array_computes_the_same": ()},
    "test_fused_models.py": {
        "test_the_benchmark_runs_on_a_cpu_and_the_losses_of_all_contenders_agree": (),
    },
    "test_fp8.py": {
        "test_the_kernel_quantizes_to_the_bits_of_the_reference": ("cpu-rows-True-e4m3",),
        "test_the_kernel_spreads_what_is_not_finite_over_its_block": ("cpu-rows",),
    },
    "test_loss_weights.py": {
        "test_evaluation_is_the_weighted_mean_over_all_its_batches": (),
        "test_random_weights_on_any_legal_layout_give_the_one_rank_gradients": (),
        "test_random_weights_on_a_layout_give_the_one_rank_run": (
            "moe: world=4 cp=2 *",
        ),
        "test_weights_of_one_give_the_bits_of_no_weights": (
            "llama dropout: *-bf16", "moe: world=4 pp=2 *-fp32",
        ),
    },
    "test_lora.py": {
        "test_every_layout_has_the_gradients_and_the_curve_of_one_rank": ("moe lora: world=4 *",),
    },
    "test_measure.py": {"test_slow_data_is_seen_as_waiting_for_data": ()},
    "test_measure_cpu.py": {
        "test_a_process_ends_when_its_processor_time_is_used": (),
        "test_two_ranks_measure_every_number_of_a_mixture": (),
    },
    "test_other_layouts.py": {
        "test_any_layout_to_any_other_and_back_keeps_weights_and_optimizer": (),
        "test_a_run_stopped_on_tp_and_pp_goes_on_on_cp_dp_and_ep_with_its_curve": (),
    },
    "test_search.py": {
        "test_the_search_finds_what_trying_everything_finds": ("config1-*",),
        "test_uneven_stages_are_searched_and_written_out": (),
        "test_a_pinned_pipeline_leaves_tensor_cuts_that_its_ranks_hold": (),
        "test_a_grid_of_given_rows_is_searched_by_its_columns": (),
    },
    "test_onebit_runs.py": {
        "test_any_layout_has_the_weights_of_the_paper_s_loop": ("lamb-gpt-4-{'pp': 2}-2-1",),
        "test_the_warm_up_is_the_run_of_one_replica": ("lamb",),
        "test_weights_are_the_same_bits_on_all_ranks_after_every_step": ("lamb-bf16",),
        "test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped": ("bf16-compressed",),
        "test_errors_go_on_with_another_layout_inside_as_many_replicas": (),
        "test_another_number_of_replicas_resets_the_errors_and_says_so_once": ("3",),
        "test_plan_tells_the_bytes_that_are_sent_and_kept": ("4-{}-bf16",),
        "test_the_volume_is_the_paper_s_share_of_float16_s_over_its_schedule": (),
    },
    "test_two_phase.py": {
        "test_what_signs_lose_is_in_the_errors": ("3-dtype1-True",),
        "test_means_are_the_paper_s_by_hand": ("False",),
        "test_an_uncompressed_mean_is_rounded_as_it_is_sent_and_summed_wide": ("sent1",),
    },
    "test_decentralized.py": {
        "test_a_ring_trains_as_the_reference": ("decentlam-overlapped", "awc_dmsgd-clip"),
        "test_each_topology_trains_as_its_matrix": ("dmsgd-one_peer_exponential-matrices3",),
        "test_replicas_of_any_layout_train_as_the_reference": ("tp",),
        "test_four_replicas_of_two_ranks_exchange_in_the_backward": (),
        "test_the_average_of_all_in_every_step_is_parallel_momentum_sgd": (),
        "test_one_replica_is_plain_momentum_sgd": ("decentlam",),
    },
    "test_decentralized_runs.py": {
        "test_a_run_says_that_its_average_is_evaluated_and_every_command_reads_it": (),
        "test_a_run_that_stopped_after_an_odd_step_goes_on_bit_for_bit": ("decentlam-*",),
        "test_on_another_number_of_replicas_all_start_from_the_average": ("awc_dmsgd-2",),
        "test_narrow_precisions_have_float64_s_curve_to_rounding": (),
    },
    "test_decentralized_bias.py": {
        "test_each_method_ends_at_its_fixed_point": (),
        "test_momentum_multiplies_the_bias_of_all_but_decentlam": (),
        "test_the_mean_of_replicas_moves_as_momentum_sgd_on_their_mean_gradient": (),
    },
    "test_mixing.py": {"test_each_rank_has_its_row_of_the_matrix_s_product": ("1", "3", "8")},
    "test_sketch.py": {
        "test_metrics_tell_the_distance_of_replicas_as_a_checkpoint_has_them": (),
    },
    "test_exchange_state.py": {
        "test_the_state_of_an_exchange_is_restored_on_any_layout": ("4-parallel2",),
    },
    "test_train_step.py": {
        "test_evaluation_is_the_mean_loss_without_dropout_on_any_layout": ("2-{'cp': 2}-{}",),
        "test_evaluation_takes_no_more_for_more_micro_batches": ("2-parallel2",),
    },
    "test_vocab_parallel.py": {
        "test_the_loss_in_chunks_is_cross_entropy_whatever_the_chunks": (
            "1-dtype1-3000-*", "2-dtype2-3072-True",
        ),
    },
    "test_compiling.py": {
        "test_compiled_blocks_give_the_losses_of_those_as_written": (),
        "test_generated_code_gives_the_same_losses_and_one_graph_serves_every_block": (),
    },
    "test_context.py": {
        "test_values_and_every_gradient_are_those_of_the_whole": (
            "4-ring-causal-documents", "4-a2a-full-documents", "4-all_gather-causal-*",
            "2-a2a-full-rows",
        ),
        "test_flash_kernels_have_the_values_and_gradients_of_the_whole": (),
        "test_a_ring_of_8192_tokens_is_torch_s_attention": ("documents-causal",),
    },
    "test_dry_run.py": {
        "test_a_rank_holds_the_state_of_the_plan_to_the_byte_and_its_peak_within_5_percent": (
            "adapters", "dropout", "interleaved", "a shared expert, folded",
            "capacity of whole sequences",
            "lamb, zero=3", "zero=3 in a pipeline", "a key head of ranks round a ring",
            "documents round a ring on CPU", "bfloat16 in float32", "a grid of experts",
        ),
        "test_a_real_step_on_cpu_holds_what_the_plan_says": ("bfloat16", "a tied table", "lamb"),
    },
    "test_fp16_layouts.py": {
        "test_a_layout_has_float64_s_gradients_to_rounding_and_one_rank_s_loss_scales": (
            "('moe', 4, {'tp': 2*",
        ),
        "test_a_run_goes_on_with_its_loss_scale_and_updates_on_any_layout": (),
    },
    "test_idle_experts.py": {
        "test_what_no_token_meets_has_zero_gradients_on_every_layout": (
            "4-{'ep': 2, 'zero': 3}-{}-all_to_all",
        ),
    },
    "test_lamb_runs.py": {
        "test_a_run_goes_on_with_the_same_curve_on_any_layout": (),
    },
    "test_suggest.py": {
        "test_the_nearest_are_the_best_of_trying_every_layout": (
            "dense-8", "few key heads-8", "moe-8",
        ),
    },
    "test_published.py": {
        "test_steps_that_were_not_fitted_on_are_predicted_within_some_per_cent": (
            "korthikanti*", "llama*", "deep_ep*", "torchtitan*",
        ),
    },
    "test_consumed_samples.py": {
        "test_one_rank_of_a_machine_hashes_the_data_and_the_others_take_rank_0s": (),
        "test_a_run_made_longer_across_an_epoch_keeps_its_samples": (),
    },
    "test_save.py": {
        "test_training_goes_on_while_the_bytes_of_a_synchronous_save_are_written": (),
    },
    "test_state.py": {
        "test_another_narrow_precision_rounds_the_masters_once": (),
        "test_any_layout_goes_on_with_the_same_curve": ("llama-(4, {'tp': 2, 'zero': 3}*",),
        "test_bf16_goes_on_from_its_float32_masters_and_fp32_weights_become_masters": (),
        "test_the_same_layout_goes_on_bit_for_bit": (),
        "test_saving_without_a_step_between_changes_no_bit": ("gpt-(4*",),
        "test_a_grid_s_run_goes_on_on_any_layout_and_there_bit_for_bit": ("llama-(4, *",),
        "test_a_grid_in_bfloat16_has_float32_s_curve_to_rounding_and_goes_on_bit_for_bit": (),
        "test_a_wider_precision_between_loses_nothing_of_a_narrow_run": (
            "(2, {'zero': 3}, {})-fp16",
        ),
        "test_a_checkpoint_holds_weights_and_moments_whole_and_without_padding": ("llama",),
        "test_a_conversion_cuts_as_a_run_of_that_layout_does": ("--cp=2,*",),
        "test_ranks_that_shared_heads_go_on_without_and_with_the_same_curve": (),
        "test_sharded_masters_are_the_same_in_a_checkpoint_as_masters_beside_weights": ("3",),
        "test_biases_of_experts_go_on_on_any_layout": (),
    },
    "test_state_bytes.py": {
        "test_the_planned_state_bytes_are_those_that_the_fullest_rank_allocates": (
            "zero=3, odd rows", "folded", "lamb, zero=3 *",
        ),
    },
    "test_summa.py": {
        "test_both_gemms_and_all_gradients_are_the_dense_ones": ("2-2", "2-3"),
        "test_sixteen_ranks_multiply_on_a_square_of_four": (),
        "test_ranks_send_each_panel_once_and_the_gradients_share_those_of_dy": ("2-3",),
    },
    "test_grid.py": {
        "test_a_layer_of_a_grid_sends_the_planned_bytes": ("llama on two rows of three",),
    },
    "test_compile.py": {
        "test_a_name_that_no_case_has_is_an_error_with_the_names_there_are": (),
        "test_the_page_is_written_by_the_command_that_it_names": ()},
    "test_process_pool.py": {"test_workers_die_with_a_parent_that_was_killed": ()},
    "test_profile.py": {"test_memory_at_its_peak_is_what_plan_says": ()},
    "test_watchdog.py": {
        "test_a_rank_that_another_waits_for_is_named": ("tensor-*", "message-*"),
        "test_a_rank_that_is_to_report_and_stops_is_reported_by_another": ("waits0",),
    },
    "test_independent_replicas.py": {
        "test_a_replica_is_the_one_rank_run_on_its_samples": ("*-4-{'tp*", "*-4-{'cp*"),
    },
    "test_sync_bytes.py": {
        "test_a_step_sends_what_is_planned": (
            "*-4-{'zero': 1}*", "*-4-{'zero': 3, 'pp': 2}*", "*mixtral*",
        ),
    },
    "test_fp16.py": {
        "test_an_overflow_halves_the_scale_passes_the_batch_over_and_updates_nothing": ("lamb",),
    },
    "test_run_lock.py": {
        "test_a_lock_that_is_taken_again_and_again_is_held_by_one_at_a_time": (),
    },
    "test_fine_tune.py": {
        "test_init_without_config_is_the_same_run": (),
        "test_a_run_goes_on_with_more_epochs": (),
    },
    "test_readers.py": {
        "test_ten_megabytes_of_manifest_and_of_header_are_read_in_seconds": (),
    },
    "test_adamw_kernel.py": {
        "test_one_launch_updates_every_tensor_as_adamw_does": ("*-dtype1-aligned or not",),
    },
    "test_gelu.py": {
        "test_bias_and_gelu_and_both_gradients_are_the_formula": ("*-shape1-*",),
    },
    "test_norm.py": {
        "test_layer_norm_and_its_gradients_are_the_formula": ("*-shape1-*", "*-shape2-*"),
    },
    "test_flash.py": {
        "test_queries_see_their_own_documents_alone": ("*a list each-True",),
        "test_flash_attention_is_softmax_attention_and_so_are_its_gradients": (
            "*tiles of 64 and a part-True", "*more keys than queries-False", "*wide*",
        ),
    },
    "test_factory.py": {
        "test_another_engine_trains_the_same_model_to_the_same_numbers": (
            "gpt dropout-Weighted", "moe-Samples",
        ),
    },
}  # fmt: skip


def is_kept(case: str, ids: tuple[str, ...]) -> bool:
    """Whether a case of a test is one of those that `make test` keeps."""
    return any(re.fullmatch(re.escape(one).replace(r"\*", ".*"), case) for one in ids)
