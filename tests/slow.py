import re

SLOW = {'test_parity.py': {'test_every_layout_is_the_one_rank_run': ('llama documents: world=8 tp=4 cp=2 '
                                                              '*',
                                                              'gpt deep: world=4 pp=4 vpp=2 *',
                                                              'moe capped: world=4 * zero=3 *',
                                                              'bert dropout: world=4 tp=4 '
                                                              'tp_mode=2d *'),
                    'test_any_legal_layout_of_four_or_eight_ranks_has_the_one_rank_gradients': ()},
 'test_diloco.py': {'test_what_compression_loses_is_sent_later': ('4 bits-3', 'largest, 2 bits-3'),
                    'test_a_replica_that_misses_an_event_rejoins_from_the_outer_weights': ('sync1',),
                    'test_gloo_exchanges_the_same_as_shared_memory': ('sync1',)},
 'test_diloco_runs.py': {'test_another_number_of_replicas_starts_from_the_outer_weights': (),
                         'test_a_run_that_changes_to_diloco_starts_from_its_weights': (),
                         'test_replicas_of_any_layout_are_one_rank_runs_that_exchange': ('moe ep '
                                                                                         'edp zero '
                                                                                         '1',),
                         'test_a_run_resumed_between_events_and_amid_an_exchange_is_bit_for_bit_the_same': ('overlap '
                                                                                                            'of '
                                                                                                            'bits',)},
 'test_leaders.py': {'test_replicas_of_any_layout_are_workers_trained_one_at_a_time': ('lsgd-pp=2',
                                                                                       'easgd-zero=1'),
                     'test_a_pull_of_1_makes_all_workers_equal_their_leader_and_leaves_that_as_it_was': ('bf16',),
                     'test_a_run_that_resumes_has_the_bits_of_one_that_was_not_stopped': ('lsgd-bf16',),
                     'test_a_run_whose_leader_has_gone_or_that_a_worker_joins_goes_on_from_the_average': (),
                     'test_one_worker_per_group_and_one_period_is_a_single_leader': ()},
 'test_rounds.py': {'test_a_slow_worker_makes_fewer_steps_and_each_part_of_the_data_is_trained_on_once': ('3-parallel0',),
                    'test_under_a_scripted_clock_workers_do_what_the_script_says': ('lsgd-four '
                                                                                    'workers',),
                    'test_workers_of_one_speed_make_the_steps_of_a_synchronous_run_bit_for_bit': ('lsgd-*',)},
 'test_fp8_runs.py': {'test_a_layout_trains_as_one_rank_does_up_to_float8_s_rounding': ("('moe', "
                                                                                        "2, {'ep': "
                                                                                        '2, '
                                                                                        "'zero': "
                                                                                        '1}, '
                                                                                        "'rowwise')",
                                                                                        "('blocks', "
                                                                                        "2, {'tp': "
                                                                                        '2}, '
                                                                                        "'blockwise')")},
 'test_loss_weights.py': {'test_evaluation_is_the_weighted_mean_over_all_its_batches': (),
                          'test_random_weights_on_any_legal_layout_give_the_one_rank_gradients': (),
                          'test_random_weights_on_a_layout_give_the_one_rank_run': ('moe: world=4 '
                                                                                    'cp=2 *',),
                          'test_weights_of_one_give_the_bits_of_no_weights': ('llama dropout: '
                                                                              '*-bf16',
                                                                              'moe: world=4 pp=2 '
                                                                              '*-fp32')},
 'test_lora.py': {'test_every_layout_has_the_gradients_and_the_curve_of_one_rank': ('moe lora: '
                                                                                    'world=4 *',)},
 'test_other_layouts.py': {'test_any_layout_to_any_other_and_back_keeps_weights_and_optimizer': (),
                           'test_a_run_stopped_on_tp_and_pp_goes_on_on_cp_dp_and_ep_with_its_curve': ()},
 'test_onebit_runs.py': {'test_any_layout_has_the_weights_of_the_paper_s_loop': ("lamb-gpt-4-{'pp': "
                                                                                 '2}-2-1',),
                         'test_the_warm_up_is_the_run_of_one_replica': ('lamb',),
                         'test_weights_are_the_same_bits_on_all_ranks_after_every_step': ('lamb-bf16',),
                         'test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped': ('bf16-compressed',),
                         'test_errors_go_on_with_another_layout_inside_as_many_replicas': (),
                         'test_another_number_of_replicas_resets_the_errors_and_says_so_once': ('3',),
                         'test_plan_tells_the_bytes_that_are_sent_and_kept': ('4-{}-bf16',),
                         'test_the_volume_is_the_paper_s_share_of_float16_s_over_its_schedule': ()},
 'test_two_phase.py': {'test_what_signs_lose_is_in_the_errors': ('3-dtype1-True',),
                       'test_means_are_the_paper_s_by_hand': ('False',),
                       'test_an_uncompressed_mean_is_rounded_as_it_is_sent_and_summed_wide': ('sent1',)},
 'test_decentralized.py': {'test_a_ring_trains_as_the_reference': ('decentlam-overlapped',
                                                                   'awc_dmsgd-clip'),
                           'test_each_topology_trains_as_its_matrix': ('dmsgd-one_peer_exponential-matrices3',),
                           'test_replicas_of_any_layout_train_as_the_reference': ('tp',),
                           'test_four_replicas_of_two_ranks_exchange_in_the_backward': (),
                           'test_the_average_of_all_in_every_step_is_parallel_momentum_sgd': (),
                           'test_one_replica_is_plain_momentum_sgd': ('decentlam',)},
 'test_decentralized_runs.py': {'test_a_run_says_that_its_average_is_evaluated_and_every_command_reads_it': (),
                                'test_a_run_that_stopped_after_an_odd_step_goes_on_bit_for_bit': ('decentlam-*',),
                                'test_on_another_number_of_replicas_all_start_from_the_average': ('awc_dmsgd-2',),
                                'test_narrow_precisions_have_float64_s_curve_to_rounding': ()},
 'test_decentralized_bias.py': {'test_each_method_ends_at_its_fixed_point': (),
                                'test_momentum_multiplies_the_bias_of_all_but_decentlam': (),
                                'test_the_mean_of_replicas_moves_as_momentum_sgd_on_their_mean_gradient': ()},
 'test_mixing.py': {'test_each_rank_has_its_row_of_the_matrix_s_product': ('1', '3', '8')},
 'test_sketch.py': {'test_metrics_tell_the_distance_of_replicas_as_a_checkpoint_has_them': ()},
 'test_exchange_state.py': {'test_the_state_of_an_exchange_is_restored_on_any_layout': ('4-parallel2',)},
 'test_train_step.py': {'test_evaluation_is_the_mean_loss_without_dropout_on_any_layout': ("2-{'cp': "
                                                                                           '2}-{}',),
                        'test_evaluation_takes_no_more_for_more_micro_batches': ('2-parallel2',)},
 'test_vocab_parallel.py': {'test_the_loss_in_chunks_is_cross_entropy_whatever_the_chunks': ('1-dtype1-3000-*',
                                                                                             '2-dtype2-3072-True')},
 'test_compiling.py': {'test_compiled_blocks_give_the_losses_of_those_as_written': (),
                       'test_generated_code_gives_the_same_losses_and_one_graph_serves_every_block': ()},
 'test_context.py': {'test_values_and_every_gradient_are_those_of_the_whole': ('4-ring-causal-documents',
                                                                               '4-a2a-full-documents',
                                                                               '4-all_gather-causal-*',
                                                                               '2-a2a-full-rows'),
                     'test_flash_kernels_have_the_values_and_gradients_of_the_whole': (),
                     'test_a_ring_of_8192_tokens_is_torch_s_attention': ('documents-causal',)},
 'test_fp16_layouts.py': {'test_a_layout_has_float64_s_gradients_to_rounding_and_one_rank_s_loss_scales': ("('moe', "
                                                                                                           '4, '
                                                                                                           "{'tp': "
                                                                                                           '2*',),
                          'test_a_run_goes_on_with_its_loss_scale_and_updates_on_any_layout': ()},
 'test_idle_experts.py': {'test_what_no_token_meets_has_zero_gradients_on_every_layout': ("4-{'ep': "
                                                                                          '2, '
                                                                                          "'zero': "
                                                                                          '3}-{}-all_to_all',)},
 'test_state.py': {'test_another_narrow_precision_rounds_the_masters_once': (),
                   'test_any_layout_goes_on_with_the_same_curve': ("llama-(4, {'tp': 2, 'zero': "
                                                                   '3}*',),
                   'test_bf16_goes_on_from_its_float32_masters_and_fp32_weights_become_masters': (),
                   'test_the_same_layout_goes_on_bit_for_bit': (),
                   'test_saving_without_a_step_between_changes_no_bit': ('gpt-(4*',),
                   'test_a_grid_s_run_goes_on_on_any_layout_and_there_bit_for_bit': ('llama-(4, '
                                                                                     '*',),
                   'test_a_grid_in_bfloat16_has_float32_s_curve_to_rounding_and_goes_on_bit_for_bit': (),
                   'test_a_wider_precision_between_loses_nothing_of_a_narrow_run': ("(2, {'zero': "
                                                                                    '3}, '
                                                                                    '{})-fp16',),
                   'test_a_checkpoint_holds_weights_and_moments_whole_and_without_padding': ('llama',),
                   'test_a_conversion_cuts_as_a_run_of_that_layout_does': ('--cp=2,*',),
                   'test_ranks_that_shared_heads_go_on_without_and_with_the_same_curve': (),
                   'test_sharded_masters_are_the_same_in_a_checkpoint_as_masters_beside_weights': ('3',),
                   'test_biases_of_experts_go_on_on_any_layout': ()},
 'test_summa.py': {'test_both_gemms_and_all_gradients_are_the_dense_ones': ('2-2', '2-3'),
                   'test_sixteen_ranks_multiply_on_a_square_of_four': (),
                   'test_ranks_send_each_panel_once_and_the_gradients_share_those_of_dy': ('2-3',)},
 'test_watchdog.py': {'test_a_rank_that_another_waits_for_is_named': ('tensor-*', 'message-*'),
                      'test_a_rank_that_is_to_report_and_stops_is_reported_by_another': ('waits0',)},
 'test_independent_replicas.py': {'test_a_replica_is_the_one_rank_run_on_its_samples': ("*-4-{'tp*",
                                                                                        "*-4-{'cp*")},
 'test_fp16.py': {'test_an_overflow_halves_the_scale_passes_the_batch_over_and_updates_nothing': ('lamb',)},
 'test_factory.py': {'test_another_engine_trains_the_same_model_to_the_same_numbers': ('gpt '
                                                                                       'dropout-Weighted',
                                                                                       'moe-Samples')}}


def is_kept(case: str, ids: tuple[str, ...]) -> bool:
    """Whether a case of a test is one of those that `make test` keeps."""
    return any(re.fullmatch(re.escape(one).replace(r"\*", ".*"), case) for one in ids)
