import Foundation
import Testing

@testable import MLXInferClient

struct StoredMessageTests {
    private static let picture = ContentPart.attachment(data: Data([1, 2, 3]), mimeType: "image/png", detail: .low)
    private static let messages: [Message] = [
        .system("Be brief."), .user([picture, .text("What is this?")]),
        Message(role: .assistant, content: "", reasoning: "Look.", toolCalls: [ToolCall(id: "c1", name: "look", arguments: "{}")]),
        .tool([.attachment(data: Data(), mimeType: "image/bmp")], callID: "c1"), Message(role: .other("critic"), content: "\u{0}🙂"),
    ]

    @Test func aStoredConversationComesBack() throws {
        let stored = try JSONEncoder().encode(Self.messages)
        #expect(try JSONDecoder().decode([Message].self, from: stored) == Self.messages)
    }

    @Test func theFormStaysTheSame() throws {
        let stored = #"""
            [{"role":"user","parts":[{"data":"AQID","mimeType":"image/png","detail":"low"},{"text":"What is this?"}],"toolCalls":[]},
             {"role":"assistant","parts":[{"text":""}],"reasoning":"Look.","toolCalls":[{"id":"c1","name":"look","arguments":"{}"}]},
             {"role":"critic","parts":[{"text":"\u0000🙂"}],"toolCalls":[]}]
            """#
        let wanted = [Self.messages[1], Self.messages[2], Self.messages[4]]
        #expect(try JSONDecoder().decode([Message].self, from: Data(stored.utf8)) == wanted)
    }

    @Test(arguments: [
        "[{}]", #"[{"role":"user","parts":[{}],"toolCalls":[]}]"#, #"[{"role":"user","parts":[{"data":"!"}],"toolCalls":[]}]"#,
    ])
    func whatIsNoMessageIsAnError(_ stored: String) {
        #expect(throws: DecodingError.self) { try JSONDecoder().decode([Message].self, from: Data(stored.utf8)) }
    }
}
