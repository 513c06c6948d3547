import Foundation
import Testing

@testable import MLXInferClient

/// Everything against the real server.
@Suite(.serialized, .enabled(if: LiveServer.command != nil, "MLXINFER_COMMAND is not set"), .timeLimit(.minutes(3)))
struct LiveTests {
    static let exact = SamplingOptions(maxTokens: 24, temperature: 0)

    @Suite struct Answers {}
    @Suite struct Guided {}
    @Suite struct Images {}
    @Suite struct Robustness {}
    @Suite struct Sharing {}
    @Suite struct Refusals {}
    @Suite struct Cancelling {}
    @Suite struct Restarting {}
    @Suite struct Program {}
    @Suite struct App {}
    @Suite struct Sessions {}
}
