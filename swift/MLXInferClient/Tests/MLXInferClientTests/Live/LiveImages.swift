import Foundation
import Testing

@testable import MLXInferClient

extension LiveTests.Images {
    /// A random checkpoint of this repository that sees images.
    private static let eyes =
        URL(fileURLWithPath: #filePath).pathComponents.dropLast(6).dropFirst().reduce("") { "\($0)/\($1)" }
        + "/tests/golden/vision/smolvlm"

    /// A BMP file of 24 x 16 pixels.
    private func picture(_ seed: UInt32) -> ContentPart {
        func bytes(_ values: [UInt32]) -> Data {
            Data(values.flatMap { value in (0..<4).map { UInt8(truncatingIfNeeded: value >> (8 * $0)) } })
        }
        var (state, rows) = (seed, Data())
        for _ in 0..<(24 * 16 * 3) {
            state = state &* 1_664_525 &+ 1_013_904_223
            rows.append(UInt8(state >> 24))
        }
        let sizes: [UInt32] = [UInt32(54 + rows.count), 0, 54, 40, 24, 16, 1 | 24 << 16, 0, UInt32(rows.count), 0, 0, 0, 0]
        return .attachment(data: Data("BM".utf8) + bytes(sizes) + rows, mimeType: "image/bmp")
    }

    @Test func twoPicturesGiveTwoAnswers() async throws {
        let server = LiveServer(model: "eyes=\(Self.eyes)")
        try await server.client.waitUntilReady(upTo: .seconds(60))
        #expect(try await server.client.models().map(\.seesImages) == [true])
        var answers: [String] = []
        for seed: UInt32 in [1, 2, 1] {
            let message = Message.user([picture(seed), .text("What is this?")])
            let answer = try await server.client.respond(to: [message], options: LiveTests.exact)
            let counted = try await server.client.countTokens([message])
            let usage = try #require(answer.usage)
            #expect(usage.imageTokens > 0 && usage.imageTokens < usage.promptTokens && usage.promptTokens == counted)
            answers.append(answer.text)
        }
        #expect(answers[0] == answers[2] && answers[0] != answers[1])
        let call = ToolCall(id: "x", name: "look", arguments: "{}")
        var results: [String] = []
        for seed: UInt32 in [1, 2] {
            let asked: [Message] = [.user("Look."), Message(role: .assistant, content: "", toolCalls: [call])]
            let messages = asked + [.tool([picture(seed)], callID: "x")]
            results.append(try await server.client.respond(to: messages, options: LiveTests.exact).text)
        }
        #expect(results[0] != results[1])
    }

    @Test func whatIsRefusedNamesThePart() async throws {
        let request = ChatRequest([.system("S"), .user([.text("A"), picture(1)])])
        guard case .api(let error) = await gather(LiveServer.shared.client.chat(request)).error else {
            Issue.record("a model of text answered")
            return
        }
        #expect(error.status == 400 && error.param == "messages[1].content[1]" && error.message.contains("cannot see images"))
    }
}
