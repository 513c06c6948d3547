import Foundation
import Testing

@testable import MLXInferClient

/// Answers of the real server, recorded with `curl --raw --include`.
struct GoldenTests {
    private func bytes(_ name: String) throws -> [UInt8] {
        let folder = URL(fileURLWithPath: #filePath).deletingLastPathComponent().deletingLastPathComponent()
        return Array(try Data(contentsOf: folder.appendingPathComponent("Golden/\(name).http")))
    }

    private func outcome<Reader: AnswerReader>(_ name: String, _ reader: Reader) throws -> Outcome<Reader.Output>
    where Reader.Output: Equatable {
        let bytes = try bytes(name)
        let expected = Outcome(reader, bytes)
        for cuts in splits(of: bytes.count).enumerated() where cuts.offset % 9 < 2 {
            #expect(Outcome(reader, bytes, cut: cuts.element) == expected, "\(name) cut at \(cuts.element)")
        }
        return expected
    }

    @Test func aChat() throws {
        var answer = ChatResponse()
        for event in try outcome("chat", StreamedAnswer(ChatStream())).output { answer.add(event) }
        #expect(answer.text == "The capital of France is Paris." && answer.finishReason == .stop && answer.model == "smollm2")
        #expect(answer.usage == Usage(promptTokens: 43, completionTokens: 8))
        #expect(answer.logprobs.count == 8 && answer.logprobs.allSatisfy { $0.top.count == 2 && $0.top[0] == $0.chosen })
        #expect(answer.logprobs[0].chosen.bytes == "The".bytes && answer.logprobs[7].chosen.token == "<|im_end|>")
    }

    @Test func aCompletion() throws {
        var answer = ChatResponse()
        for event in try outcome("completion", StreamedAnswer(CompletionStream())).output { answer.add(event) }
        #expect(answer.text == "One, two, or three-digit" && answer.finishReason == .length)
        #expect(answer.logprobs.map(\.chosen.token) == [",", " two", ",", " or", " three", "-", "digit"])
        #expect(answer.logprobs[3].top.map(\.token) == [" or", " three"])
    }

    @Test func errors() throws {
        let model = try outcome("unknown-model", StreamedAnswer(ChatStream()))
        #expect(model.failure == "The model 'nope' is not served here. (model) [404 invalid_request_error]")
        let tools = try outcome("refused-tools", WholeAnswer())
        #expect(tools.failure == "tools: not supported yet (tools) [400 invalid_request_error]")
    }

    @Test func whatTheServerSaysOfItself() throws {
        let models = try JSONDecoder().decode(ModelList.self, from: Data(outcome("models", WholeAnswer()).output.joined()))
        #expect(models.data == [Model(id: "smollm2", maxTokens: 8192)])
        let health = try JSONDecoder().decode(Health.self, from: Data(outcome("health", WholeAnswer()).output.joined()))
        #expect(health == Health(status: "ok", version: "0.1.0", models: ["smollm2"]) && health.isReady)
    }
}
